#include "probe_256.h"

namespace dw {
extern const ProbeKernels probe_avx2;
const ProbeKernels probe_avx2 = {read, arithmetic<0>, arithmetic<0>, arithmetic<2>};
}  // namespace dw
