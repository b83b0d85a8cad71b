// What a kernel is asked to do, as plain data: shared by the binding, the driver and every
// instruction set.
//
// No member functions here: they would be emitted as weak symbols by several instruction sets, and
// the linker might keep the AVX-512 copy for all of them.
#pragma once

#include <cstdint>

namespace sb {

enum class Dtype { kFloat32, kBfloat16, kFloat16 };

// A [tokens, heads, head_dim] tensor with a contiguous last dimension; strides in elements.
struct View {
  const void* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct Problem {
  int64_t tokens;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t sequences;
  int64_t block_size;
  int64_t max_budget;
  const int32_t* cu_seqlens;  // [sequences + 1]
  const int32_t* budget;      // [sequences, query_heads]
  Dtype dtype;
  float scale;
  int threads;
  int64_t chunk;  // tokens per task; 0 chooses. Results do not depend on it.
  bool poison;    // fill scratch memory with NaN, to find reads of what nobody wrote
};

// The rows of one KV head of one sequence from token `begin` on, up to TaskList::chunk tokens.
struct Task {
  int64_t sequence;
  int64_t head;
  int64_t begin;
  int64_t list;   // number of the first block's list among all (sequence, KV head, block)
  int64_t means;  // where the block means of this (sequence, KV head) start, in blocks; -1: no gate
                  // needed
  bool dense;     // every row attends every earlier block: there is no list
};

struct TaskList {
  const Task* tasks;
  int64_t count;
  int64_t chunk;    // tokens, whole segments
  int64_t segment;  // tokens, whole blocks: sums over rows are cut here, whatever the chunk
  int64_t longest;  // most tokens that a task really has
  int64_t width;    // keys of the longest block that occurs, rounded up to 16
  int64_t lists;
};

// Up to 16 consecutive blocks of one KV head whose means are computed together.
struct MeanTask {
  int64_t sequence;
  int64_t head;
  int64_t block;
  int64_t count;
  int64_t out;  // place among all means
};

struct MeanList {
  const MeanTask* tasks;
  int64_t count;
  int64_t columns;  // all means
  int64_t longest;  // most of one (sequence, KV head)
};

// Blocks [begin, end) of one (sequence, KV head), each with an earlier one: their sampled rows add
// up to one sum by rank for each query head.
struct CoverageTask {
  int64_t sequence;
  int64_t head;
  int64_t begin;
  int64_t end;
  int64_t means;  // where the block means of this (sequence, KV head) start
  int64_t sums;   // where its sums start, `ranks` for each query head
  int64_t ranks;  // a multiple of 16
};

struct CoverageList {
  const CoverageTask* tasks;
  int64_t count;
  int64_t row_stride;  // every row_stride-th row is sampled, and each block's last
  int64_t max_rank;
};

struct Gradients {
  void* dq;
  void* dk;
  void* dv;
};

enum Status : int { kOk = 0, kOutOfMemory = 1 };

// One per instruction set. `lists` and `rows` are the index of cpu/attention.h.
struct KernelTable {
  const char* name;
  int (*select)(const Problem& problem, const TaskList& tasks, const MeanList& means, View q,
                View k, int16_t* selection);
  int (*forward)(const Problem& problem, const TaskList& tasks, View q, View k, View v,
                 const int64_t* lists, const int32_t* rows, void* out, float* lse);
  int (*backward)(const Problem& problem, const TaskList& tasks, View dout, View q, View k, View v,
                  View out, const float* lse, const float* dlse, const int64_t* lists,
                  const int32_t* rows, Gradients gradients);
  int (*coverage)(const Problem& problem, const CoverageList& tasks, const MeanList& means, View q,
                  View k, float* sums);
};

}  // namespace sb
