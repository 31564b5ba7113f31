// Low-rank additions to linear layers: a request's rows go through the products of its own adapter, y += up(down(x)), in the middle of
// a pass that all requests share.
//
// Same bits: both products are those of linear.h, rounded to the dtype of rows, and the sum is rounded: what a row gets depends on the
// row and its adapter alone.
#pragma once

#include <cstdint>

#include "experts.h"
#include "linear.h"
#include "ranks.h"

namespace dw {

// The adapters of a model, by number. Numbers over 0; no adapter is number 0.
struct Adapters;

// `sizes` [sites, 2]: inputs and outputs of each linear layer that may be added to, of rows of dtype `rows`.
Adapters* adapters_create(int64_t sites, const int64_t* sizes, DType rows);
void adapters_free(Adapters*);

// What an adapter adds, site by site. `downs` [sites]: [rank, inputs], or null: nothing. `counts` [sites]: how many products follow it;
// they lie one behind the other in `ups`: each is [outputs, r] and reads columns `firsts` .. of the product before, writes columns
// `starts` .. of the layer's. Layers are not kept alive. Throws std::invalid_argument if they do not fit, or the number is taken.
void adapters_put(Adapters*, int64_t number, const Linear* const* downs, const int64_t* counts, const Linear* const* ups,
                  const int64_t* firsts, const int64_t* starts);
void adapters_drop(Adapters*, int64_t number);

struct AdaptCall {
  const Adapters* adapters;
  int64_t site;
  const int64_t* numbers;      // [requests] the adapter of each; null: nobody has one
  const int32_t* query_start;  // [requests + 1]
  int64_t requests;
  const void* x;  // [rows, inputs], row stride ldx
  int64_t ldx;
  void* out;  // [rows, outputs], row stride ldo
  int64_t ldo;
  Ranks* ranks;  // with whom the first product is summed up, or null
};

void adapters_run(const Shares&, const AdaptCall&);

}  // namespace dw
