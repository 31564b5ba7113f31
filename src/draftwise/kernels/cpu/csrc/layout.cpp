// The sizes of the structures that Python mirrors with ctypes and struct, for a test of the mirrors.
#include "attention.h"
#include "block.h"
#include "books.h"
#include "boundary.h"
#include "experts.h"
#include "isa.h"
#include "ops.h"
#include "program.h"
#include "sample.h"
#include "steps.h"
#include "suffix.h"
#include "tree.h"
#include "verify.h"

namespace {
struct Layout {
  const char* name;
  int64_t bytes;
};
const Layout layouts[] = {
    {"AttentionCall", sizeof(dw::AttentionCall)}, {"BatchView", sizeof(dw::BatchView)},
    {"BlockPlan", sizeof(dw::BlockPlan)},         {"Correction", sizeof(dw::Correction)},
    {"ChainKey", sizeof(dw::ChainKey)},           {"ChainOutput", sizeof(dw::ChainOutput)},
    {"ExpertsSetting", sizeof(dw::ExpertsSetting)}, {"PassInput", sizeof(dw::PassInput)},
    {"ProgramOp", sizeof(dw::ProgramOp)},         {"FillBook", sizeof(dw::FillBook)},           {"RequestBook", sizeof(dw::RequestBook)},
    {"RopeCall", sizeof(dw::RopeCall)},           {"RowBook", sizeof(dw::RowBook)},
    {"SuffixDraft", sizeof(dw::SuffixDraft)},     {"SuffixLimits", sizeof(dw::SuffixLimits)},
    {"TableBook", sizeof(dw::TableBook)},
    {"TreeOutput", sizeof(dw::TreeOutput)},       {"TreeWish", sizeof(dw::TreeWish)},
    {"VerifyDraw", sizeof(dw::VerifyDraw)},
};
}  // namespace

// Name and size of structure i, null behind the last.
DW_EXPORT const char* dw_layout(int i, int64_t* bytes) {
  return dw::guarded([&]() -> const char* {
    if (i < 0 || i >= int(sizeof(layouts) / sizeof(layouts[0]))) return nullptr;
    *bytes = layouts[i].bytes;
    return layouts[i].name;
  });
}
