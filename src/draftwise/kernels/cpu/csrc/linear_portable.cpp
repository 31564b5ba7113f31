#include "linear_impl.h"

namespace dw {

extern const LinearKernels linear_portable;
const LinearKernels linear_portable = {
    {tile_plain<W_F32>, tile_plain<W_BF16>, tile_plain<W_I8>, tile_plain<W_I8_DYN>, tile_grouped<W_I4>, tile_grouped<W_I4_DYN>},
    finish_plain,
    quantize_plain,
    sum_bytes,
    {8, 8, 8, 8, 8, 8},
    {},
    {},
    nullptr,
    {},
    {}};

}  // namespace dw
