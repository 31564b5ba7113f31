#include "probe_512.h"

namespace dw {
extern const ProbeKernels probe_avx512vnni;
const ProbeKernels probe_avx512vnni = {read, arithmetic<0>, arithmetic<0>, arithmetic<2>};
}  // namespace dw
