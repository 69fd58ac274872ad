// Random numbers by the global index of an element: `ir::random`.
#pragma once
#include "common.cuh"

// Philox4x32-10: `ir::random::philox4x32_10`.
__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 p0 = (u64)0xD2511F53u * counter.x, p1 = (u64)0xCD9E8D57u * counter.z;
        counter = make_uint4((u32)(p1 >> 32) ^ counter.y ^ key.x, (u32)p1,
                             (u32)(p0 >> 32) ^ counter.w ^ key.y, (u32)p0);
        key = make_uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
    }
    return counter;
}

struct Stream {
    uint2 seed, key;
    // The words of elements `4 block .. 4 block + 4`.
    __device__ __forceinline__ void words(u64 block, u32* out) const {
        uint4 four = philox(make_uint4((u32)block, (u32)(block >> 32), key.x, key.y), seed);
        out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
    }
    __device__ __forceinline__ u32 word(u64 index) const {
        u32 four[4];
        words(index / 4, four);
        u32 low = index % 2 ? four[1] : four[0], high = index % 2 ? four[3] : four[2];
        return index % 4 < 2 ? low : high;
    }
    // Those of Length elements from `index` on.
    template <int Length> __device__ __forceinline__ void words_from(u64 index, u32* out) const {
        if (Length % 4 == 0 && index % 4 == 0) {
#pragma unroll
            for (int j = 0; j < Length / 4; j++) words(index / 4 + j, out + 4 * j);
        } else {
#pragma unroll
            for (int j = 0; j < Length; j++) out[j] = word(index + j);
        }
    }
};

__device__ __forceinline__ Stream stream_of(const int* seed, i64 key) {
    i64 seeds = *seed;
    return {make_uint2((u32)seeds, (u32)(seeds >> 32)), make_uint2((u32)key, (u32)((u64)key >> 32))};
}

// A dimension that rows are counted by: how many, and by how much the global index grows.
struct Rows {
    i64 size, stride;
};

// The global index of the first element of row `row` of those counted by `n_dims` dims, outermost first,
// of which the first starts at `first`.
__device__ __forceinline__ u64 index_of_row(i64 row, i64 first, const Rows* dims, int n_dims) {
    u64 index = first;
    for (int dim = n_dims - 1; dim >= 0; dim--) {
        index += row % dims[dim].size * dims[dim].stride;
        row /= dims[dim].size;
    }
    return index;
}
