#include "probe_512.h"

namespace dw {
extern const ProbeKernels probe_avx512;
const ProbeKernels probe_avx512 = {read, arithmetic<0>, arithmetic<1>, arithmetic<2>};
}  // namespace dw
