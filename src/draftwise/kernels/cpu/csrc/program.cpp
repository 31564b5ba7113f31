#include "program.h"

#include <cstring>
#include <memory>
#include <vector>

#include "adapters.h"
#include "attention_plan.h"
#include "boundary.h"
#include "draws.h"
#include "experts.h"
#include "heads.h"
#include "narrow.h"
#include "ops.h"
#include "ranks.h"
#include "team.h"

namespace dw {

struct Program {
  std::vector<ProgramOp> body, head;
  std::vector<int64_t> offsets;  // of each arena buffer: bytes per row before it; address = arena + offset * capacity
  int32_t num_externals = 0;
  bool small = false;  // no product is worth more than the handing out of tasks
  bool narrows = false;  // there is an OP_NARROW
};

namespace {

void* address(const Program& program, const PassInput& pass, int32_t buffer) {
  if (buffer < program.num_externals) return pass.externals[buffer];
  return pass.arena + program.offsets[(size_t)(buffer - program.num_externals)] * pass.capacity;
}

AttentionCall attention_call(const Program& program, const ProgramOp& op, const PassInput& pass) {
  return AttentionCall{address(program, pass, op.x), op.kv, op.kv_scales, address(program, pass, op.out), op.width,
                       op.num_heads, op.num_kv_heads, op.head_dim, op.window, op.kv_dtype, op.scale, op.softcap,
                       op.epilogue & 1, (const float*)op.weight, op.epilogue >> 1};
}

AdaptCall adapt_call(const Program& program, const ProgramOp& op, const PassInput& pass) {
  return AdaptCall{(const Adapters*)op.weight, op.num_heads, pass.adapters, pass.batch.query_start, pass.batch.requests,
                   address(program, pass, op.x), op.width, address(program, pass, op.out), op.out_width, (Ranks*)op.weight2};
}

constexpr int64_t SMALL_BYTES = 4 << 20;  // of weights
constexpr int64_t TEAM_ROWS = 16;
constexpr int64_t TEAM_ATTENTION = 1 << 14;  // products that are worth a second thread in a team

// Operations that a team shares; false: the leader does it alone.
bool share_op(Team* team, const Program& program, const ProgramOp& op, const PassInput& pass, int64_t rows,
              int threads) {
  if (op.kind == OP_LINEAR) {
    LinearCall call{(const Linear*)op.weight, address(program, pass, op.x), op.width, address(program, pass, op.out),
                    op.out_width, (DType)op.out_dtype, rows, (Epilogue)op.epilogue};
    team_do(team, [](void* arg, int part, int parts) { linear_run_part((const LinearCall*)arg, part, parts); }, &call);
    return true;
  }
  if (op.kind == OP_EXPERTS || op.kind == OP_HEADS || op.kind == OP_ADAPT) {
    Shares shares{team,
                  [](void* context, int tasks, void (*task)(void*, int), void* arg) {
                    struct Work {
                      int tasks;
                      void (*task)(void*, int);
                      void* arg;
                    } work{tasks, task, arg};
                    auto part = [](void* raw, int number, int parts) {
                      const Work& w = *(const Work*)raw;
                      for (int i = number; i < w.tasks; i += parts) w.task(w.arg, i);
                    };
                    if (tasks == 1)
                      part(&work, 0, 1);
                    else
                      team_do((Team*)context, part, &work);
                  },
                  threads};
    if (op.kind == OP_ADAPT) {
      adapters_run(shares, adapt_call(program, op, pass));
      return true;
    }
    if (op.kind == OP_HEADS) {
      heads_run(shares, (const Heads*)op.weight, address(program, pass, op.x), op.width, address(program, pass, op.out),
                op.out_width, rows);
      return true;
    }
    experts_route_run(shares, (const Experts*)op.weight, address(program, pass, op.x),
                      (const float*)address(program, pass, op.y), address(program, pass, op.out), rows);
    return true;
  }
  if (op.kind != OP_ATTENTION) return false;
  AttentionCall call = attention_call(program, op, pass);
  AttentionRun run = attention_plan((DType)op.dtype, &call, &pass.batch, threads, 1, TEAM_ATTENTION);
  struct Phase {
    const AttentionRun* run;
    int number;
  };
  for (int number = 0; number < 2; number++) {
    Phase phase{&run, number};
    auto work = [](void* arg, int part, int parts) {
      const Phase& p = *(const Phase*)arg;
      for (int task = part; task < p.run->tasks[p.number]; task += parts) attention_task(p.run, p.number, task);
    };
    if (run.one_thread) {
      work(&phase, 0, 1);
    } else if (run.tasks[number] > 0) {
      team_do(team, work, &phase);
    }
  }
  return true;
}

void run_op(Pool* pool, const Program& program, const ProgramOp& op, const PassInput& pass, const int64_t* slots,
            int64_t rows) {
  DType dtype = (DType)op.dtype;
  auto at = [&](int32_t buffer) { return address(program, pass, buffer); };
  switch (op.kind) {
    case OP_GATHER:
      gather_rows(op.weight, op.out_width, (const int64_t*)at(op.x), at(op.out), rows, op.width);
      break;
    case OP_COPY:
      memcpy(at(op.out), at(op.x), (size_t)(rows * op.width));
      break;
    case OP_RMS_NORM:
      rms_norm(pool, dtype, at(op.x), (const float*)op.weight, op.eps, at(op.out), rows, op.width);
      break;
    case OP_ADD_RMS_NORM:
      add_rms_norm(pool, dtype, at(op.x), at(op.y), (const float*)op.weight, op.eps, at(op.out), rows, op.width);
      break;
    case OP_SILU_MUL:
      (op.epilogue ? linear_silu_mul : silu_mul)(pool, dtype, at(op.x), at(op.out), rows, op.width);
      break;
    case OP_LINEAR: {
      LinearCall call{(const Linear*)op.weight, at(op.x), op.width, at(op.out), op.out_width, (DType)op.out_dtype, rows,
                      (Epilogue)op.epilogue};
      linear_run(pool, &call);
      break;
    }
    case OP_ROPE_WRITE: {
      RopeCall call{at(op.x), (const float*)at(op.y), slots, op.kv, op.kv_scales, (const float*)op.weight,
                    (const float*)op.weight2, op.eps, rows, op.num_heads, op.num_kv_heads, op.head_dim, op.kv_dtype,
                    op.width, op.epilogue};
      rope_write(pool, dtype, &call);
      break;
    }
    case OP_ATTENTION: {
      AttentionCall call = attention_call(program, op, pass);
      attention(pool, dtype, &call, &pass.batch);
      break;
    }
    case OP_PICK:
      if (pass.head_index != nullptr)
        gather_rows(at(op.x), pass.rows, pass.head_index, at(op.out), rows, op.width);
      else
        memcpy(at(op.out), at(op.x), (size_t)(rows * op.width));
      break;
    case OP_CONCAT:
      concat_rows(at(op.x), op.width, at(op.y), op.out_width, at(op.out), rows);
      break;
    case OP_ADD:
      add_rows(pool, dtype, at(op.x), at(op.y), rows, op.width);
      break;
    case OP_CLEAR_FIRST:
      clear_first_rows(at(op.x), (const int64_t*)at(op.y), rows, op.width);
      break;
    case OP_EXPERTS:
      experts_route_run(shares_of(pool), (const Experts*)op.weight, at(op.x), (const float*)at(op.y), at(op.out), rows);
      break;
    case OP_GATED:
      gated_rows(pool, dtype, (Activation)op.epilogue, op.scale, op.softcap, at(op.x), at(op.out), rows, op.width);
      break;
    case OP_SCALE:
      scale_rows(pool, dtype, at(op.x), op.scale, rows, op.width);
      break;
    case OP_SOFTCAP:
      softcap_rows(pool, (float*)at(op.x), op.softcap, rows, op.width);
      break;
    case OP_LAYER_NORM:
      layer_norm_rows(pool, dtype, at(op.x), (const float*)op.weight, (const float*)op.weight2, op.eps, at(op.out), rows,
                      op.width);
      break;
    case OP_UNARY:
      unary_rows(pool, dtype, (Function)op.epilogue, at(op.x), at(op.out), rows, op.width);
      break;
    case OP_MUL:
      mul_rows(pool, dtype, at(op.x), at(op.y), at(op.out), rows, op.width);
      break;
    case OP_HEADS:
      heads_run(shares_of(pool), (const Heads*)op.weight, at(op.x), op.width, at(op.out), op.out_width, rows);
      break;
    case OP_COLUMNS:
      for (int64_t r = 0; r < rows; r++)
        memcpy((char*)at(op.out) + r * op.out_width, (const char*)at(op.x) + r * op.width + op.head_dim, (size_t)op.out_width);
      break;
    case OP_ADAPT:
      adapters_run(shares_of(pool), adapt_call(program, op, pass));
      break;
    case OP_SUM_RANKS:
      ranks_sum((Ranks*)op.weight, dtype, at(op.x), rows * op.width);
      break;
    case OP_GATHER_RANKS:
      ranks_gather((Ranks*)op.weight, (const float*)at(op.x), op.width, op.out_width, (float*)at(op.out), rows);
      break;
    case OP_GATHER_PART:
      gather_part_rows(op.weight, op.num_heads, op.out_width, (const int64_t*)at(op.x), at(op.out), rows, op.width);
      break;
    default:
      break;
  }
}

// What a pass reads of the largest product.
int64_t bytes_of(const ProgramOp& op) {
  if (op.kind == OP_LINEAR) return linear_bytes((const Linear*)op.weight);
  if (op.kind == OP_HEADS) return heads_bytes((const Heads*)op.weight);
  return op.kind == OP_EXPERTS ? experts_step_bytes((const Experts*)op.weight) : 0;
}

}  // namespace
}  // namespace dw

// External buffers 0, 1, 2 are token ids, positions and slots.
constexpr int32_t SLOTS = 2;

static dw::Program* create(const dw::ProgramOp* body, int64_t body_count, const dw::ProgramOp* head, int64_t head_count,
                           const int64_t* offsets, int64_t num_arena, int32_t num_externals) {
  auto program = std::make_unique<dw::Program>();
  program->body.assign(body, body + body_count);
  program->head.assign(head, head + head_count);
  program->offsets.assign(offsets, offsets + num_arena);
  program->num_externals = num_externals;
  program->small = true;
  for (const auto* ops : {&program->body, &program->head})
    for (const dw::ProgramOp& op : *ops)
      if (dw::bytes_of(op) > dw::SMALL_BYTES) program->small = false;
  for (const dw::ProgramOp& op : program->body) program->narrows |= op.kind == dw::OP_NARROW;
  return program.release();
}

DW_EXPORT dw::Program* dw_program_create(const dw::ProgramOp* body, int64_t body_count, const dw::ProgramOp* head,
                                         int64_t head_count, const int64_t* offsets, int64_t num_arena,
                                         int32_t num_externals) {
  return dw::guarded([&] { return create(body, body_count, head, head_count, offsets, num_arena, num_externals); });
}

DW_EXPORT void dw_program_destroy(dw::Program* program) {
  dw::guarded([&] { delete program; });
}

size_t dw::num_externals(const Program* program) { return (size_t)program->num_externals; }

// Calls run(op, pass) for all operations; `narrow`: the pass behind OP_NARROW, or null.
template <class Run>
static void run_all(const dw::Program& program, const dw::PassInput& wide, const dw::PassInput* narrow, const Run& run) {
  const dw::PassInput* pass = &wide;
  for (const dw::ProgramOp& op : program.body) {
    if (op.kind != dw::OP_NARROW) {
      run(op, *pass, pass->rows);
    } else if (narrow != nullptr) {
      if (narrow->rows == 0) return;
      dw::move_up(dw::address(program, wide, op.x), op.width, wide.head_index, narrow->rows);
      pass = narrow;
    }
  }
  if (pass->head_rows > 0)
    for (const dw::ProgramOp& op : program.head) run(op, *pass, pass->head_rows);
}

bool dw::run_pass(const Program* program, Pool* pool, const PassInput* pass) {
  static thread_local NarrowRows rows;
  PassInput narrow;
  const bool fewer = program->narrows && narrowed(*pass, rows, &narrow);
  const PassInput* behind = fewer ? &narrow : nullptr;
  const int64_t* slots = (const int64_t*)pass->externals[SLOTS];
  // A small pass is shared by a team or, while the cores are wanted by others, not at all.
  const bool small = program->small && pass->rows <= TEAM_ROWS && pool_threads(pool) > 1;
  const bool shared = small && team_ready(pool);
  if (shared) {
    struct Context {
      const Program* program;
      const PassInput *pass, *behind;
      const int64_t* slots;
      int threads;
    } context{program, pass, behind, slots, pool_threads(pool)};
    team_run(
        pool,
        [](void* arg, Team* team) {
          const Context& c = *(const Context*)arg;
          run_all(*c.program, *c.pass, c.behind, [&](const ProgramOp& op, const PassInput& now, int64_t count) {
            if (!share_op(team, *c.program, op, now, count, c.threads))
              run_op(nullptr, *c.program, op, now, c.slots, count);
          });
        },
        &context);
    return fewer;
  }
  if (small) pool = nullptr;
  struct Open {
    Pool* pool;
    explicit Open(Pool* p) : pool(p) { pool_begin(p); }
    ~Open() { pool_end(pool); }
  } open(pool);
  run_all(*program, *pass, behind, [&](const ProgramOp& op, const PassInput& now, int64_t count) {
    run_op(pool, *program, op, now, slots, count);
  });
  return fewer;
}

DW_EXPORT void dw_program_run(dw::Program* program, dw::Pool* pool, const dw::PassInput* pass) {
  dw::guarded([&] { run_pass(program, pool, pass); });
}

void dw::draw_all(Pool* pool, const float* logits, const ChainOutput* out, int64_t requests, int64_t step, const int32_t* going) {
  struct Context {
    const float* logits;
    const dw::ChainOutput* out;
    int64_t step;
    const int32_t* going;
  } context{logits, out, step, going};
  constexpr int64_t SHARED_WORK = 1 << 17;  // logits from which a second thread brings more than it costs
  dw::parallel_for(
      requests * out->vocab < SHARED_WORK ? nullptr : pool, (int)requests,
      [](void* arg, int number, int) {
        const Context& c = *(const Context*)arg;
        const dw::ChainOutput* o = c.out;
        const int64_t request = c.going != nullptr ? c.going[number] : number, place = request * o->steps + c.step;
        const float* row = c.logits + number * o->vocab;
        o->tokens[place] = dw::draw_one(row, o->keys, request, o->stream, c.step, o->target_ids,
                                        o->q != nullptr ? o->q + place * o->vocab : nullptr, o->vocab);
      },
      &context);
}

void dw::draft_chains(const Program* program, Pool* pool, const PassInput* first, const ChainOutput* out) {
  if (out->steps == 0) {  // nobody wants any: rows are read
    PassInput pass = *first;
    pass.head_rows = 0;
    run_pass(program, pool, &pass);
    return;
  }
  const size_t requests = (size_t)first->batch.requests, bytes = out->feature_in >= 0 ? (size_t)out->feature_bytes : 0;
  PassInput pass = *first;
  std::vector<void*> externals(first->externals, first->externals + program->num_externals);
  std::vector<int64_t> ids(requests), positions(requests), slots(requests);
  std::vector<char> features(requests * bytes);
  std::vector<int32_t> starts(requests + 1), contexts(requests), first_keys, tables, going(requests);
  std::vector<uint8_t> no_tree(requests);
  for (size_t r = 0; r <= requests; r++) starts[r] = (int32_t)r;
  for (size_t r = 0; r < requests; r++) going[r] = (int32_t)r;
  const float* logits = (const float*)externals.back();
  const BatchView& view = first->batch;
  for (int64_t step = 0; !going.empty(); step++) {
    const bool narrow = run_pass(program, pool, &pass);
    draw_all(pool, logits, out, (int64_t)going.size(), step, going.data());
    // Who wants more moves up. Example: of three chains of 2, 1 and 2 tokens the first and the third have rows 0 and 1 of the second pass.
    size_t left = 0;
    for (size_t i = 0; i < going.size(); i++) {
      const size_t r = (size_t)going[i];
      if (step + 1 >= (out->lengths != nullptr ? out->lengths[r] : out->steps)) continue;
      const int64_t key = out->positions[r] + step, block = view.block_tables[(int64_t)r * view.table_stride + key / view.block_size];
      ids[left] = out->tokens[(int64_t)r * out->steps + step];
      positions[left] = key - out->key_offset;
      contexts[left] = (int32_t)key;
      slots[left] = block * view.block_size + key % view.block_size;
      if (bytes) {
        const int64_t row = pass.head_index != nullptr && !narrow ? pass.head_index[i] : (int64_t)i;
        memcpy(features.data() + left * bytes, (const char*)externals[(size_t)out->feature_out] + row * (int64_t)bytes, bytes);
      }
      going[left++] = (int32_t)r;
    }
    if (left < going.size()) {
      going.resize(left);
      tables.clear();
      first_keys.clear();
      for (int32_t r : going) {
        const int32_t* table = view.block_tables + r * view.table_stride;
        tables.insert(tables.end(), table, table + view.table_stride);
        if (view.first_key != nullptr) first_keys.push_back(view.first_key[r]);
      }
      pass.batch.block_tables = tables.data();
      if (view.first_key != nullptr) pass.batch.first_key = first_keys.data();
      pass.batch.requests = (int32_t)left;
    }
    externals[0] = ids.data();
    externals[1] = positions.data();
    externals[SLOTS] = slots.data();
    if (bytes) externals[(size_t)out->feature_in] = features.data();
    pass.externals = externals.data();
    pass.rows = pass.head_rows = (int64_t)left;
    pass.head_index = nullptr;
    pass.batch.query_start = starts.data();
    pass.batch.context_len = contexts.data();
    pass.batch.is_tree = no_tree.data();
    pass.batch.ancestors = nullptr;
    pass.batch.tree_start = nullptr;
  }
}

DW_EXPORT void dw_program_chains(dw::Program* program, dw::Pool* pool, const dw::PassInput* first, const dw::ChainOutput* out) {
  dw::guarded([&] { draft_chains(program, pool, first, out); });
}
