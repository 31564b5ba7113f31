#include "narrow.h"

#include <cstring>

namespace dw {

bool narrowed(const PassInput& wide, NarrowRows& rows, PassInput* narrow) {
  if (wide.head_only == 0 || wide.head_rows >= wide.rows) return false;
  if (wide.head_rows > 0 && wide.head_index == nullptr) return false;  // the first ones
  const BatchView& batch = wide.batch;
  const int64_t* index = wide.head_index;
  const size_t requests = (size_t)batch.requests;
  rows.starts.assign(requests + 1, 0);
  rows.contexts.assign(batch.context_len, batch.context_len + requests);
  rows.ancestors.clear();
  int64_t taken = 0;
  for (size_t r = 0; r < requests; r++) {
    const int64_t begin = batch.query_start[r], end = batch.query_start[r + 1], first = taken;
    for (; taken < wide.head_rows && index[taken] < end; taken++) {
      if (index[taken] < begin || (taken > first && index[taken] != index[taken - 1] + 1)) return false;
      if (batch.ancestors != nullptr) rows.ancestors.push_back(batch.ancestors[index[taken]]);
    }
    const int64_t left = end - begin - (taken - first);
    if (taken > first && (index[taken - 1] != end - 1 || (batch.is_tree[r] != 0 && left != 0))) return false;
    if (batch.is_tree[r] == 0) rows.contexts[r] += (int32_t)left;
    rows.starts[r + 1] = (int32_t)taken;
  }
  if (taken != wide.head_rows) return false;
  *narrow = wide;
  narrow->rows = wide.head_rows;
  narrow->head_index = nullptr;
  narrow->batch.query_start = rows.starts.data();
  narrow->batch.context_len = rows.contexts.data();
  if (batch.ancestors != nullptr) narrow->batch.ancestors = rows.ancestors.data();
  return true;
}

void move_up(void* rows, int64_t bytes, const int64_t* index, int64_t count) {
  char* at = (char*)rows;
  for (int64_t i = 0; i < count; i++)
    if (index[i] != i) memcpy(at + i * bytes, at + index[i] * bytes, (size_t)bytes);
}

}  // namespace dw
