// MoBA block-sparse causal attention on CPU: the calls behind the ops, without torch.
//
// All throw std::invalid_argument for values that Check refuses and std::runtime_error where memory
// is short. Results are the same bit for bit for any number of threads.
#pragma once

#include <cstdint>

#include "attention/problem.h"

namespace sb {

// Refuses cu_seqlens, budgets and sizes that the kernels cannot run; max_seqlen < 0 is not checked.
void Check(const Problem& problem, int64_t max_seqlen);

// selection [query_heads, tokens, max_budget - 1]: earlier blocks only, ascending, padded with -1.
void Select(const Problem& problem, View q, View k, int16_t* selection);

// How many lists the index has room for: all (sequence, KV head, block).
int64_t ListCapacity(int64_t tokens, int64_t sequences, int64_t kv_heads, int64_t block_size);

// Inverts a selection: rows[lists[i] .. lists[i + 1]) attend block i, as token * G + head within
// the group, ascending. A (sequence, KV head) whose rows all attend every earlier block has empty
// lists. lists [ListCapacity + 1], rows [tokens * query_heads * (max_budget - 1)].
void Index(const Problem& problem, const int16_t* selection, int64_t* lists, int32_t* rows);

// Refuses rows that Index cannot have written. `lists` must already ascend within the rows.
void CheckIndex(const Problem& problem, const int64_t* lists, const int32_t* rows);

// out [tokens, query_heads, head_dim] contiguous; lse [query_heads, tokens] natural log.
void Forward(const Problem& problem, View q, View k, View v, const int64_t* lists,
             const int32_t* rows, void* out, float* lse);

// Gradients are contiguous; dlse [query_heads, tokens] or nullptr.
void Backward(const Problem& problem, View dout, View q, View k, View v, View out, const float* lse,
              const float* dlse, const int64_t* lists, const int32_t* rows, Gradients gradients);

// mass [sequences, query_heads, max_rank]: the share of routing score by rank, mean over the
// sampled rows that have an earlier block; 0 where there is none. The budget of the problem is not
// read.
void Coverage(const Problem& problem, View q, View k, int64_t row_stride, int64_t max_rank,
              float* mass);

// Threads that a call may use: `wanted`, or 1 in a forked child, where the parent's OpenMP threads
// do not exist.
int SafeThreads(int wanted);

}  // namespace sb
