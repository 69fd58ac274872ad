// Adds rows of a gradient to the rows of a table that they came from, in the order of the ids.
//
// Macros: X and OUT, element types of the gradient and of the result; WIDTH, elements that a thread sums
// (a vector where rows are whole vectors, else 1). The result has been set to zero.
#include "common.cuh"

constexpr int THREADS = 256;
// Ids that a block looks at together.
constexpr int WINDOW = 4 * THREADS;
// Rows that a thread has in flight.
constexpr int UNROLL = 8;

// The row that gets the gradient of `id`; -1 if there is none here.
__device__ __forceinline__ i64 row_of(int id, i64 start, i64 extent, i64 padding) {
    i64 row = id - start;
    return id >= 0 && id != padding && row >= 0 && row < extent ? row : -1;
}

// For each row the first position of its id and the complement of the last: two minima, and of
// integers, so that the order of the threads does not matter. `ends` has been set to all ones.
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_grad_ends(const int* __restrict__ ids, uint2* ends, i64 n, i64 start, i64 extent,
                    i64 padding) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    i64 row = row_of(ids[i], start, extent, padding);
    if (row < 0) return;
    atomicMin(&ends[row].x, (u32)i);
    atomicMin(&ends[row].y, ~(u32)i);
}

// The bits of those of positions `at` .. `at + 4`, within `first ..= last`, that have this id.
__device__ __forceinline__ u32 matches(const int* ids, i64 at, i64 first, i64 last, int id) {
    u32 res = 0;
    if (at >= first && at + 3 <= last) {
        int4 four = *reinterpret_cast<const int4*>(ids + at);
        return (four.x == id) | (four.y == id) << 1 | (four.z == id) << 2 | (four.w == id) << 3;
    }
    for (int j = 0; j < 4; j++) {
        if (at + j >= first && at + j <= last && ids[at + j] == id) res |= 1u << j;
    }
    return res;
}

// Lists the positions with this id among the WINDOW from `base` on, in order; how many there are.
__device__ __forceinline__ int list_window(const int* ids, i64 base, i64 first, i64 last, int id,
                                           u32* list) {
    __shared__ int totals[THREADS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 at = base + threadIdx.x * 4;
    u32 found = matches(ids, at, first, last, id);
    int count = __popc(found), before = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
    }
    // The lists of the window before have been read by all before they are overwritten.
    __syncthreads();
    if (lane == 31) totals[warp] = before;
    __syncthreads();
    int slot = before - count, total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) {
        if (i < warp) slot += totals[i];
        total += totals[i];
    }
    for (int j = 0; j < 4; j++) {
        if (found >> j & 1) list[slot++] = (u32)(at + j);
    }
    __syncthreads();
    return total;
}

// A block for each position and each tile of columns: that of an id's first position sums all.
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_grad(const int* __restrict__ ids, const X* __restrict__ dy, const uint2* __restrict__ ends,
               OUT* __restrict__ out, i64 d, i64 start, i64 extent, i64 padding) {
    __shared__ u32 list[WINDOW];
    i64 here = blockIdx.x;
    int id = ids[here];
    i64 row = row_of(id, start, extent, padding);
    if (row < 0) return;
    uint2 end = ends[row];
    if (end.x != here) return;
    i64 last = ~end.y;
    i64 column = ((i64)blockIdx.y * THREADS + threadIdx.x) * WIDTH;
    bool within = column < d;
    const X* from = dy + column;
    float sum[WIDTH] = {};
    auto add = [&](const float* x) {
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sum[j] += x[j];
    };
    auto add_row = [&](i64 position) {
        float x[WIDTH];
        load<WIDTH>(from + position * d, x);
        add(x);
    };
    if (within) add_row(here);
    // Windows start at multiples of their size, so that fours of ids are aligned.
    for (i64 base = here / WINDOW * WINDOW; base <= last && last > here; base += WINDOW) {
        int total = list_window(ids, base, here + 1, last, id, list);
        if (!within) continue;
        int k = 0;
        for (; k + UNROLL <= total; k += UNROLL) {
            float x[UNROLL][WIDTH];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) load<WIDTH>(from + list[k + u] * d, x[u]);
#pragma unroll
            for (int u = 0; u < UNROLL; u++) add(x[u]);
        }
        for (; k < total; k++) add_row(list[k]);
    }
    if (within) store<WIDTH>(out + row * d + column, sum);
}
