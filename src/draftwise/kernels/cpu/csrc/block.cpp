#include "block.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "boundary.h"
#include "program.h"
#include "team.h"
#include "tree.h"

namespace dw {
namespace {

// External buffers of a pass of a head that reads features; hidden rows and logits are the last two.
constexpr size_t IDS = 0, POSITIONS = 1, SLOTS = 2;

// The pass over root and masks of some requests: rows, and what it gave.
//
// Example: 6 known tokens, 3 rows, blocks of 4 tokens: the rows stand at keys 6, 7 and 8, positions 5, 6 and 7. A request
// with blocks (9, 4) has slots for 6 and 7; key 8 is in its first scratch block.
class BlockPass {
 public:
  BlockPass(const Program* program, Pool* pool, const PassInput* context, const PassInput* own, const BlockPlan* plan)
      : program_(program), pool_(pool), context_(*context), pass_(*own), plan_(*plan),
        externals_(own->externals, own->externals + num_externals(program)) {
    const BlockPlan& p = plan_;
    require(p.rows > 0 && p.places > 0 && p.first_row + p.places <= p.rows && p.together > 0, "a block with places");
    require(p.together * p.rows <= own->capacity, "room for the rows of a pass");
    const BatchView& view = context->batch;
    require(p.scratch_each * view.block_size >= p.rows, "scratch blocks for a block");
    for (int32_t r = 0; r < view.requests; r++)
      require(view.query_start[r] < view.query_start[r + 1], "a row of each request, that of its last token");
    width_ = p.hidden * (p.dtype == BF16 ? 2 : 4);
  }

  int requests() const { return context_.batch.requests; }
  int64_t size() const { return end_ - begin_; }
  // Tokens of request number r of the pass that are known.
  int64_t known(int64_t r) const { return known_of(begin_ + r); }
  int64_t root(int64_t r) const {
    return ((const int64_t*)context_.externals[IDS])[context_.batch.query_start[begin_ + r + 1] - 1];
  }
  // [size, vocab] of a place.
  float* logits(int64_t place) const { return (float*)externals_.back() + place * size() * plan_.vocab; }
  const char* hidden(int64_t place, int64_t r) const {
    return (const char*)externals_[externals_.size() - 2] + (r * plan_.rows + plan_.first_row + place) * width_;
  }

  // Requests [begin, end), and how many of their places are wanted.
  void run(int64_t begin, int64_t end, int64_t places) {
    begin_ = begin;
    end_ = end;
    const BatchView& view = context_.batch;
    const int64_t count = size(), rows = plan_.rows, own = view.table_stride, wide = own + plan_.scratch_each;
    const int64_t block = view.block_size;
    ids_.assign((size_t)(count * rows), plan_.mask_token);
    positions_.resize((size_t)(count * rows));
    slots_.resize((size_t)(count * rows));
    tables_.assign((size_t)(count * wide), 0);
    starts_.resize((size_t)count + 1);
    contexts_.resize((size_t)count);
    no_tree_.assign((size_t)count, 0);
    wanted_.resize((size_t)(count * places));
    for (int64_t r = 0; r < count; r++) {
      const int64_t known_tokens = known(r);
      const int64_t filled = blocks_of(begin + r);
      require(filled <= own, "blocks for all known tokens");
      int32_t* table = tables_.data() + r * wide;
      memcpy(table, view.block_tables + (begin + r) * own, (size_t)filled * sizeof(int32_t));
      for (int64_t i = 0; i < plan_.scratch_each; i++)
        table[filled + i] = (int32_t)(plan_.scratch_first + r * plan_.scratch_each + i);
      starts_[(size_t)r] = (int32_t)(r * rows);
      contexts_[(size_t)r] = (int32_t)known_tokens;
      ids_[(size_t)(r * rows)] = root(r);
      for (int64_t i = 0; i < rows; i++) {
        const int64_t key = known_tokens + i;
        positions_[(size_t)(r * rows + i)] = key - 1;
        slots_[(size_t)(r * rows + i)] = (int64_t)table[key / block] * block + key % block;
      }
      for (int64_t place = 0; place < places; place++)
        wanted_[(size_t)(place * count + r)] = r * rows + plan_.first_row + place;
    }
    starts_[(size_t)count] = (int32_t)(count * rows);
    externals_[IDS] = ids_.data();
    externals_[POSITIONS] = positions_.data();
    externals_[SLOTS] = slots_.data();
    pass_.externals = externals_.data();
    pass_.rows = count * rows;
    pass_.head_rows = count * places;
    pass_.head_index = wanted_.data();
    pass_.batch = BatchView{starts_.data(), contexts_.data(), no_tree_.data(), tables_.data(), nullptr,
                            view.first_key != nullptr ? view.first_key + begin : nullptr, nullptr, wide, (int32_t)count,
                            view.block_size};
    run_pass(program_, pool_, &pass_);
  }

 private:
  int64_t known_of(int64_t r) const {
    const BatchView& view = context_.batch;
    return (int64_t)view.context_len[r] + view.query_start[r + 1] - view.query_start[r];
  }
  // Blocks that hold a request's known tokens. What it has reserved beyond them is left alone: rows that stand in scratch
  // blocks give the same bits.
  int64_t blocks_of(int64_t r) const { return (known_of(r) + context_.batch.block_size - 1) / context_.batch.block_size; }

  const Program* program_;
  Pool* pool_;
  PassInput context_, pass_;
  BlockPlan plan_;
  std::vector<void*> externals_;
  int64_t width_ = 0, begin_ = 0, end_ = 0;
  std::vector<int64_t> ids_, positions_, slots_, wanted_;
  std::vector<int32_t> tables_, starts_, contexts_;
  std::vector<uint8_t> no_tree_;
};

std::unique_ptr<Corrector> corrector_of(const BlockPlan* plan, Pool* pool) {
  if (plan->correction == nullptr) return nullptr;
  return std::make_unique<Corrector>(plan->correction, pool, (DType)plan->dtype, plan->hidden, plan->vocab);
}

// Workers stay awake between the products of several places.
struct Awake {
  Pool* pool;
  Awake(Pool* p, bool wanted) : pool(wanted ? p : nullptr) { pool_begin(pool); }
  ~Awake() { pool_end(pool); }
};

// The drafts of one pass, place after place.
class ChainDraw {
 public:
  ChainDraw(BlockPass& pass, Corrector* corrector, const BlockPlan* plan, const ChainOutput& out)
      : pass_(pass), corrector_(corrector), out_(out), previous_((size_t)pass.size()), hidden_((size_t)pass.size()) {
    for (size_t r = 0; r < previous_.size(); r++) previous_[r] = pass.root((int64_t)r);
    if (corrector != nullptr) state_.assign(previous_.size() * (size_t)plan->correction->state_width, 0.0f);
  }

  void run(Pool* pool) {
    const int64_t count = pass_.size();
    for (int64_t step = 0; step < out_.steps; step++) {
      float* logits = pass_.logits(step);
      if (corrector_ != nullptr) {
        for (int64_t r = 0; r < count; r++) hidden_[(size_t)r] = pass_.hidden(step, r);
        corrector_->run(step, count, previous_.data(), hidden_.data(), state_.data(), logits);
      }
      draw_all(pool, logits, &out_, count, step);
      for (int64_t r = 0; r < count; r++) previous_[(size_t)r] = out_.tokens[r * out_.steps + step];
    }
  }

  // The same, with small products shared by a team.
  void run_in(Team* team) {
    corrector_->use(team);
    run(nullptr);
    corrector_->use(nullptr);
  }

 private:
  BlockPass& pass_;
  Corrector* corrector_;
  ChainOutput out_;
  std::vector<int64_t> previous_;
  std::vector<const char*> hidden_;
  std::vector<float> state_;
};

constexpr int64_t TEAM_ROWS = 16;

void draw_chains(BlockPass& pass, Corrector* corrector, Pool* pool, const BlockPlan* plan, const ChainOutput* out) {
  const int64_t steps = out->steps;
  require(steps > 0 && steps <= plan->places, "as many drafts as a block has places");
  for (int64_t begin = 0; begin < pass.requests(); begin += plan->together) {
    pass.run(begin, std::min<int64_t>(begin + plan->together, pass.requests()), steps);
    ChainOutput part = *out;
    part.tokens += begin * steps;
    if (part.keys != nullptr) part.keys += begin;
    if (part.q != nullptr) part.q += begin * steps * plan->vocab;
    ChainDraw draw(pass, corrector, plan, part);
    const bool large = corrector != nullptr && corrector->shares(pass.size());
    if (corrector != nullptr && !large && pass.size() <= TEAM_ROWS && pool_threads(pool) > 1 && team_ready(pool)) {
      team_run(pool, [](void* arg, Team* team) { ((ChainDraw*)arg)->run_in(team); }, &draw);
    } else {
      Awake awake(pool, large);
      draw.run(pool);
    }
  }
}

constexpr int64_t NODE_NUMBERS = 1 << 22;  // logits that nodes are corrected in together: 16 MB

// The nodes of one level of the trees of a pass, whose logits differ by what the token before each says.
class Nodes {
 public:
  Nodes(BlockPass& pass, Corrector* corrector, const BlockPlan* plan, std::vector<TreeDraft>& drafts)
      : pass_(pass), corrector_(corrector), plan_(plan), drafts_(drafts) {
    carried_ = corrector != nullptr ? (size_t)plan->correction->state_width : 0;
    store_.assign(drafts.size() * PLACES * carried_, 0.0f);
  }

  void level(const std::vector<int>& going, int64_t place) {
    place_ = place;
    for (int r : going)
      for (size_t i = 0; i < drafts_[(size_t)r].open().size(); i++) {
        waiting_.push_back(Waiting{r, (int)i});
        if ((int64_t)waiting_.size() * plan_->vocab >= NODE_NUMBERS) take();
      }
    take();
  }

 private:
  static constexpr size_t PLACES = 1 + MAX_TREE_ROWS;  // states of a request's root and fed nodes
  struct Waiting {
    int request, index;
  };

  float* state_of(int request, int node) {
    return store_.data() + ((size_t)request * PLACES + (size_t)(1 + drafts_[(size_t)request].number(node))) * carried_;
  }

  void take() {
    if (waiting_.empty()) return;
    const int64_t vocab = plan_->vocab;
    if (corrector_ != nullptr) {
      const size_t count = waiting_.size();
      logits_.resize(count * (size_t)vocab);
      states_.resize(count * carried_);
      previous_.clear();
      hidden_.clear();
      for (size_t k = 0; k < count; k++) {
        const auto [r, i] = waiting_[k];
        const TreeDraft& draft = drafts_[(size_t)r];
        const int node = draft.open()[(size_t)i];
        memcpy(logits_.data() + k * (size_t)vocab, pass_.logits(place_) + r * vocab, (size_t)vocab * sizeof(float));
        previous_.push_back(node < 0 ? pass_.root(r) : draft.token(node));
        hidden_.push_back(pass_.hidden(place_, r));
        if (node < 0)
          std::fill_n(states_.begin() + (std::ptrdiff_t)(k * carried_), carried_, 0.0f);
        else
          std::copy_n(state_of(r, draft.parent(node)), carried_, states_.begin() + (std::ptrdiff_t)(k * carried_));
      }
      corrector_->run(place_, (int64_t)count, previous_.data(), hidden_.data(), states_.data(), logits_.data());
    }
    for (size_t k = 0; k < waiting_.size(); k++) {
      const auto [r, i] = waiting_[k];
      TreeDraft& draft = drafts_[(size_t)r];
      if (carried_ > 0)
        std::copy_n(states_.begin() + (std::ptrdiff_t)(k * carried_), carried_, state_of(r, draft.open()[(size_t)i]));
      const float* own = corrector_ != nullptr ? logits_.data() + k * (size_t)vocab : pass_.logits(place_) + r * vocab;
      draft.take(i, own, scratch_, noise_);
    }
    waiting_.clear();
  }

  BlockPass& pass_;
  Corrector* corrector_;
  const BlockPlan* plan_;
  std::vector<TreeDraft>& drafts_;
  size_t carried_ = 0;
  int64_t place_ = 0;
  std::vector<Waiting> waiting_;
  std::vector<float> store_, states_, logits_, scratch_, noise_;
  std::vector<int64_t> previous_;
  std::vector<const char*> hidden_;
};

void draw_trees(BlockPass& pass, Corrector* corrector, const BlockPlan* plan, const TreeOutput* out) {
  for (int64_t begin = 0; begin < pass.requests(); begin += plan->together) {
    pass.run(begin, std::min<int64_t>(begin + plan->together, pass.requests()), plan->places);
    std::vector<TreeDraft> drafts;
    for (int64_t r = 0; r < pass.size(); r++) drafts.emplace_back(&out->wishes[begin + r], out->vocab, out->target_ids);
    Nodes nodes(pass, corrector, plan, drafts);
    std::vector<int> going((size_t)pass.size()), next;
    std::iota(going.begin(), going.end(), 0);
    for (int64_t place = 0; place < plan->places && !going.empty(); place++) {
      nodes.level(going, place);
      next.clear();
      for (int r : going)
        if (drafts[(size_t)r].next_level()) next.push_back(r);
      going = next;
    }
    for (int64_t r = 0; r < pass.size(); r++) {
      const int64_t at = (begin + r) * MAX_TREE_ROWS;
      out->counts[begin + r] = drafts[(size_t)r].finish(out->tokens + at, out->parents + at);
    }
  }
}

}  // namespace

void block_chains(const Program* store, const Program* program, Pool* pool, const PassInput* context, const PassInput* own,
                  const BlockPlan* plan, const ChainOutput* out) {
  BlockPass pass(program, pool, context, own, plan);
  auto corrector = corrector_of(plan, pool);
  run_pass(store, pool, context);
  draw_chains(pass, corrector.get(), pool, plan, out);
}

void block_trees(const Program* store, const Program* program, Pool* pool, const PassInput* context, const PassInput* own,
                 const BlockPlan* plan, const TreeOutput* out) {
  BlockPass pass(program, pool, context, own, plan);
  auto corrector = corrector_of(plan, pool);
  run_pass(store, pool, context);
  draw_trees(pass, corrector.get(), plan, out);
}

}  // namespace dw

DW_EXPORT void dw_block_chains(const dw::Program* store, const dw::Program* program, dw::Pool* pool,
                               const dw::PassInput* context, const dw::PassInput* own, const dw::BlockPlan* plan,
                               const dw::ChainOutput* out) {
  dw::guarded([&] { block_chains(store, program, pool, context, own, plan, out); });
}

DW_EXPORT void dw_block_trees(const dw::Program* store, const dw::Program* program, dw::Pool* pool,
                              const dw::PassInput* context, const dw::PassInput* own, const dw::BlockPlan* plan,
                              const dw::TreeOutput* out) {
  dw::guarded([&] { block_trees(store, program, pool, context, own, plan, out); });
}
