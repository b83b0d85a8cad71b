// MoBA block-sparse causal attention on CUDA: the calls behind the ops, without torch.
//
// All pointers are the device's, those in Problem too. Calls return at once; they wait for nothing
// and copy nothing to the host, and what they launch depends on sizes alone, so that a CUDA graph
// can hold them. All throw std::runtime_error where a launch fails. bf16 and fp16; head_dim 32, 64
// or 128; views start at 16 bytes and have strides of multiples of 8.
#pragma once

#include <cstdint>

#include "attention/problem.h"

namespace sb {
namespace cuda {

// Where to launch. The caller has made its device current.
struct Machine {
  int multiprocessors;
  int64_t shared_bytes;  // most that a block of threads may have
  void* stream;
};
Machine CurrentMachine(void* stream);

// Each op needs scratch memory: call it with workspace nullptr for the number of bytes, which
// depends on sizes alone; nothing runs then. Scratch need not be initialised, and starts at 256
// bytes.
//
// max_seqlen bounds the lengths. Results do not depend on it.

// selection [query_heads, tokens, max_budget - 1]: earlier blocks only, ascending, padded with -1.
int64_t Select(const Problem& problem, int64_t max_seqlen, const Machine& machine, View q, View k,
               int16_t* selection, void* workspace);

// lists [kv_heads * (tokens / block_size + sequences) + 1], rows [tokens * query_heads *
// (max_budget - 1)]: as in cpu/attention.h; rows that no list uses are -1.
int64_t Index(const Problem& problem, const Machine& machine, const int16_t* selection,
              int64_t* lists, int32_t* rows, void* workspace);

// out [tokens, query_heads, head_dim] contiguous; lse [query_heads, tokens] natural log.
int64_t Forward(const Problem& problem, int64_t max_seqlen, const Machine& machine, View q, View k,
                View v, const int64_t* lists, const int32_t* rows, void* out, float* lse,
                void* workspace);

// Gradients are contiguous; dlse [query_heads, tokens] or nullptr. dk and dv are the same bit for
// bit in every run; dq is where `deterministic`, else it is summed up by atomic additions.
int64_t Backward(const Problem& problem, int64_t max_seqlen, const Machine& machine, View dout,
                 View q, View k, View v, View out, const float* lse, const float* dlse,
                 const int64_t* lists, const int32_t* rows, Gradients gradients, bool deterministic,
                 void* workspace);

// mass [sequences, query_heads, max_rank]: as moba_coverage of attention/coverage.py. The problem's
// budget is nullptr.
int64_t Coverage(const Problem& problem, int64_t max_seqlen, const Machine& machine, View q, View k,
                 int64_t row_stride, int64_t max_rank, float* mass, void* workspace);

struct BudgetProblem {
  int64_t sequences, heads, ranks, max_budget, min_budget;
  const float* mass;       // [sequences, heads, ranks]
  const int32_t* cost_us;  // [sequences, max_budget]
  const int64_t* tau_us;   // one number, as is tolerance
  const float* tolerance;
  const int32_t* k0;  // [sequences], or one number
  bool one_k0;
  const int32_t* cu_seqlens;  // [sequences + 1], or nullptr: all weigh the same, and none is short
  int64_t block_size, row_stride;
  bool tune_short;
};

// budgets [sequences]: bit for bit those of the CPU.
int64_t Budget(const BudgetProblem& problem, const Machine& machine, int32_t* budgets,
               void* workspace);

}  // namespace cuda
}  // namespace sb
