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

}  // namespace cuda
}  // namespace sb
