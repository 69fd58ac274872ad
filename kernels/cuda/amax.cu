// The largest magnitudes of many tensors: one launch for parts, one for the largest of them. What is no
// number is ignored. Macro: X, the tensors' element type.
#include "amax.cuh"
#include "pieces.cuh"

constexpr int THREADS = 256;
// Elements of a part; `CHUNK` on the host's side.
constexpr int CHUNK = 32768;

// A row of the table: a tensor, its parts, and where its amax goes.
struct Tensor {
    const X* x;
    X* out;
    i64 n, first_part, n_parts;
};

// A block for each (tensor, chunk) pair.
extern "C" __global__ void __launch_bounds__(THREADS)
amax_parts(const Tensor* __restrict__ tensors, const uint2* __restrict__ chunks, float* __restrict__ parts) {
    uint2 chunk = chunks[blockIdx.x];
    Tensor t = tensors[chunk.x];
    constexpr int N = 16 / sizeof(X), STEP = THREADS * N, AHEAD = 4;
    i64 first = (i64)chunk.y * CHUNK, end = min(first + CHUNK, t.n);
    i64 i = first + threadIdx.x * N;
    float res = 0;
    for (; i + (AHEAD - 1) * STEP + N <= end; i += AHEAD * STEP) {
        Vector<X, N> x[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) x[u] = load_vector<N>(t.x + i + u * STEP);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
#pragma unroll
            for (int j = 0; j < N; j++) res = fmaxf(res, fabsf(x[u][j]));
        }
    }
    for (; i < end; i += STEP) {
        i64 n = min(end - i, (i64)N);
        for (int j = 0; j < n; j++) res = fmaxf(res, fabsf(to_f32(t.x[i + j])));
    }
    res = block_max(res);
    if (threadIdx.x == 0) parts[t.first_part + chunk.y] = res;
}

// A block for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
amax(const Tensor* __restrict__ tensors, const float* __restrict__ parts) {
    Tensor t = tensors[blockIdx.x];
    float res = 0;
    for (i64 i = threadIdx.x; i < t.n_parts; i += THREADS) res = fmaxf(res, parts[t.first_part + i]);
    res = block_max(res);
    if (threadIdx.x == 0) *t.out = from_f32<X>(res);
}

// A block for each piece of one tensor of `n_dims` dimensions. For tests: elements are read one by one.
extern "C" __global__ void __launch_bounds__(THREADS)
amax_pieces(const X* __restrict__ x, X* __restrict__ out, const PieceDim* __restrict__ dims, int n_dims) {
    i64 start = 0, n = 1, rest = blockIdx.x;
    for (int d = n_dims - 1; d >= 0; d--) {
        start += rest % dims[d].n * dims[d].part * dims[d].stride;
        rest /= dims[d].n;
        n *= dims[d].part;
    }
    float res = 0;
    for (i64 i = threadIdx.x; i < n; i += THREADS) {
        i64 rest = i, at = start;
        for (int d = n_dims - 1; d >= 0; d--) {
            at += rest % dims[d].part * dims[d].stride;
            rest /= dims[d].part;
        }
        res = fmaxf(res, fabsf(to_f32(x[at])));
    }
    res = block_max(res);
    if (threadIdx.x == 0) out[blockIdx.x] = from_f32<X>(res);
}
