// Dropout: an element stays by its global index alone, see `ir::random`. Macros: X, the element type;
// WIDTH, elements that a thread takes (a vector where rows are whole vectors, else 1).
#include "common.cuh"

constexpr int THREADS = 256;

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
};

struct Rows {
    i64 size, stride;
};

// `x` is rows of `n` elements with neighbouring global indices. Those of the first row start at
// `first`; the rows' indices are those of `n_dims` dims, the outermost first. A block takes
// THREADS * WIDTH elements of one row, `tiles` blocks a row. `out` may be the memory of `x`.
extern "C" __global__ void __launch_bounds__(THREADS)
dropout(const X* x, const int* __restrict__ seed, X* out, const Rows* __restrict__ dims, int n_dims,
        i64 n, i64 tiles, i64 first, i64 key, i64 threshold, float scale) {
    i64 row = blockIdx.x / tiles, rest = row;
    u64 index = first;
    for (int dim = n_dims - 1; dim >= 0; dim--) {
        index += rest % dims[dim].size * dims[dim].stride;
        rest /= dims[dim].size;
    }
    i64 column = (blockIdx.x % tiles * THREADS + threadIdx.x) * WIDTH;
    if (column >= n) return;
    index += column;
    i64 at = row * n + column;
    i64 seeds = *seed;
    Stream stream = {make_uint2((u32)seeds, (u32)(seeds >> 32)),
                     make_uint2((u32)key, (u32)((u64)key >> 32))};
    auto drop = [&](float x, u32 word) { return (i64)word >= threshold ? x * scale : 0.0f; };
    if (column + WIDTH > n) {
        for (; column < n; column++, at++, index++) {
            out[at] = from_f32<X>(drop(to_f32(x[at]), stream.word(index)));
        }
        return;
    }
    u32 words[WIDTH];
    if (WIDTH % 4 == 0 && index % 4 == 0) {
#pragma unroll
        for (int j = 0; j < WIDTH / 4; j++) stream.words(index / 4 + j, words + 4 * j);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; j++) words[j] = stream.word(index + j);
    }
    float values[WIDTH];
    load<WIDTH>(x + at, values);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) values[j] = drop(values[j], words[j]);
    store<WIDTH>(out + at, values);
}
