// Tensors rounded to what codes with a scale for each block stand for: MXFP8 and NVFP4. Arithmetic is that of
// `ir::quant::mx` and `nvfp4`, operation by operation. A result may be the memory of its operand.
// Macros: X, the element type; A, that of the amax; CODE (e4m3 or e5m2: MXFP8; e2m1: NVFP4); SQUARE and STOCHASTIC (1 or 0).
#include "codes.cuh"
#include "pieces.cuh"
#include "random.cuh"

constexpr int THREADS = 256;
constexpr float LARGEST = 3.402823466e38f;

// What is divided by the scale of a block when it is coded, and multiplied by it afterwards: factors of both.
struct Factors {
    float there, back;
};

template <class Code> constexpr float largest = 448.0f;
template <> constexpr float largest<e5m2> = 57344.0f;

// MXFP8.
template <class Code> struct Format {
    static constexpr int BLOCK = 32;

    // The scale is a number of E8M0: a power of two, rounded up, 2^-127 at least.
    static __device__ __forceinline__ Factors factors(float amax, float) {
        u32 bits = __float_as_uint(__fmul_rn(amax, 1.0f / largest<Code>));
        u32 exponent = min((bits + (bits > 1u << 22 ? 0x7fffffu : 0u)) >> 23, 0xfeu);
        float back = __uint_as_float(exponent ? exponent << 23 : 1u << 22);
        return {__fdiv_rn(1.0f, back), back};
    }
    static __device__ __forceinline__ float coded(float x, float factor, u32) {
        return to_f32(Code{(u8)pack_codes<Code>(__fmul_rn(x, factor), 0.0f)});
    }
};

struct e2m1 {};

// NVFP4.
template <> struct Format<e2m1> {
    static constexpr int BLOCK = 16;
    static constexpr float RANGE = 448.0f * 6.0f;

    // `whole` is the amax of the tensor: `Level`.
    static __device__ __forceinline__ Factors factors(float amax, float whole) {
        float encode = fminf(__fdiv_rn(RANGE, whole), LARGEST);
        if (whole == 0.0f || encode == 0.0f) encode = 1.0f;
        float inner = fminf(__fmul_rn(amax, __fmul_rn(encode, 1.0f / 6.0f)), LARGEST);
        float scale = to_f32(e4m3{(u8)pack_codes<e4m3>(inner, 0.0f)});
        float there = __fdiv_rn(1.0f, __fmul_rn(scale, __fdiv_rn(1.0f, encode)));
        return {fminf(there, LARGEST), __fmul_rn(__fmul_rn(scale, whole), 1.0f / RANGE)};
    }

    // To nearest even, which numbers of steps and their codes are together; or away from zero if what is beyond
    // a whole step is at least 1 - byte / 256, where the byte is the upper one of `word`.
    static __device__ __forceinline__ float coded(float x, float factor, u32 word) {
        // What is no number is 6.
        float scaled = __fmul_rn(x, factor), abs = fminf(fabsf(scaled), 6.0f);
        float step = abs < 2.0f ? 0.5f : abs < 4.0f ? 1.0f : 2.0f;
        float steps = abs < 2.0f ? 2.0f * abs : abs < 4.0f ? abs : 0.5f * abs;
        if constexpr (STOCHASTIC) {
            float least = 1.0f - (float)(word >> 24) * 0x1p-8f, n = truncf(steps);
            return copysignf((steps - n >= least ? n + 1.0f : n) * step, x);
        }
        return copysignf(rintf(steps) * step, isnan(x) ? 0.0f : x);
    }
};

using Coding = Format<CODE>;
constexpr int BLOCK = Coding::BLOCK;

// The largest over `lanes` neighbouring lanes.
template <int lanes> __device__ __forceinline__ float largest_of(float x) {
#pragma unroll
    for (int lane = lanes / 2; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

// The amax of the piece that element `i` is in; MXFP8 has none.
__device__ __forceinline__ float whole_amax(const A* amax, const PieceDim* pieces, int n_pieces, i64 i) {
    return amax ? to_f32(amax[piece_of(pieces, n_pieces, i)]) : 0.0f;
}

// The global index of element `i`, see `dropout`.
__device__ __forceinline__ u64 global_index(i64 i, i64 row, i64 first, const Rows* dims, int n_dims) {
    return n_dims ? index_of_row(i / row, first, dims, n_dims) + i % row : first + i;
}

// Blocks of neighbours, of which a thread has a vector.
extern "C" __global__ void __launch_bounds__(THREADS)
round_rows(const X* x, X* out, i64 n, i64 n_columns, const A* amax, const PieceDim* __restrict__ pieces,
           int n_pieces, const int* __restrict__ seed, i64 key, const Rows* __restrict__ dims, int n_dims,
           i64 row, i64 first, i64 row_stride) {
    constexpr int N = 16 / sizeof(X);
    i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * N;
    float values[N] = {}, most = 0.0f;
    if (i < n) load<N>(x + i, values);
#pragma unroll
    for (int j = 0; j < N; j++) most = fmaxf(most, fabsf(values[j]));
    most = largest_of<BLOCK / N>(most);
    if (i >= n) return;
    Factors factors = Coding::factors(most, whole_amax(amax, pieces, n_pieces, i));
    u32 words[N] = {};
    if constexpr (STOCHASTIC) {
        stream_of(seed, key).words_from<N>(global_index(i, row, first, dims, n_dims), words);
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        values[j] = __fmul_rn(Coding::coded(values[j], factors.there, words[j]), factors.back);
    }
    store<N>(out + i, values);
}

// Blocks of neighbours in a column, a thread for each; or squares of such columns. `row_stride` is by how much
// global indices grow from row to row.
extern "C" __global__ void __launch_bounds__(THREADS)
round_columns(const X* x, X* out, i64 n, i64 n_columns, const A* amax, const PieceDim* __restrict__ pieces,
              int n_pieces, const int* __restrict__ seed, i64 key, const Rows* __restrict__ dims, int n_dims,
              i64 row, i64 first, i64 row_stride) {
    i64 index = (i64)blockIdx.x * THREADS + threadIdx.x;
    i64 i = index / n_columns * BLOCK * n_columns + index % n_columns;
    float values[BLOCK] = {}, most = 0.0f;
    if (i < n) {
#pragma unroll
        for (int j = 0; j < BLOCK; j++) values[j] = to_f32(x[i + j * n_columns]);
    }
#pragma unroll
    for (int j = 0; j < BLOCK; j++) most = fmaxf(most, fabsf(values[j]));
    if constexpr (SQUARE) most = largest_of<BLOCK>(most);
    if (i >= n) return;
    Factors factors = Coding::factors(most, whole_amax(amax, pieces, n_pieces, i));
    Stream stream;
    u64 at = 0;
    if constexpr (STOCHASTIC) {
        stream = stream_of(seed, key);
        at = global_index(i, row, first, dims, n_dims);
    }
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
        u32 word = 0;
        if constexpr (STOCHASTIC) word = stream.word(at + j * row_stride);
        float res = __fmul_rn(Coding::coded(values[j], factors.there, word), factors.back);
        out[i + j * n_columns] = from_f32<X>(res);
    }
}
