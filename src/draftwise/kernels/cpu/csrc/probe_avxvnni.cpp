#include "probe_256.h"

namespace dw {
extern const ProbeKernels probe_avxvnni;
const ProbeKernels probe_avxvnni = {read, arithmetic<0>, arithmetic<0>, arithmetic<2>};
}  // namespace dw
