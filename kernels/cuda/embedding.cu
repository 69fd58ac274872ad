// Rows of a table. Macro: UNIT, what is copied at a time: uint4 where rows are whole multiples of 16
// bytes, else an unsigned type of the element's size.
#include "common.cuh"

// A block for each id; `n` units a row. Ids of rows that other ranks hold give zeros.
extern "C" __global__ void __launch_bounds__(256)
embedding(const int* __restrict__ ids, const UNIT* __restrict__ table, UNIT* __restrict__ out, i64 n,
          i64 start, i64 extent) {
    int id = ids[blockIdx.x];
    i64 row = id - start;
    bool held = id >= 0 && row >= 0 && row < extent;
    const UNIT* from = table + row * n;
    UNIT* to = out + (i64)blockIdx.x * n;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) to[i] = held ? from[i] : UNIT();
}
