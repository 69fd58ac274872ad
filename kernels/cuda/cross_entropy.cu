// Cross entropy: a block for each token's row of logits, each row read once.
//
// Macro: X, the logits' element type. A row may start anywhere (an odd vocabulary): elements up to the
// first multiple of 16 bytes come one by one, as do those after the last whole vector.
#include "common.cuh"

constexpr int N = 16 / sizeof(X);
// Vectors that a thread has in flight.
constexpr int UNROLL = 4;
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ float exponential(float x) {
    if constexpr (sizeof(X) == 4) return expf(x);
    // 2^-22 relative, far below the rounding of the logits themselves.
    float res;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(res) : "f"(x * 1.44269504f));
    return res;
}

// Where the whole vectors of a row of `n` elements are.
struct Span {
    int head, vectors, tail;
    __device__ __forceinline__ Span(const X* row, int n) {
        int past = (int)((u64)row % 16 / sizeof(X));
        head = past == 0 ? 0 : min(N - past, n);
        vectors = (n - head) / N;
        tail = head + vectors * N;
    }
};

// `f` on all elements of a row in arrays of N or 1.
template <class F> __device__ __forceinline__ void for_row(const X* row, int n, F f) {
    Span span(row, n);
    auto one = [&](int i) {
        float x[1] = {to_f32(row[i])};
        f(x);
    };
    if (threadIdx.x < span.head) one(threadIdx.x);
    const X* body = row + span.head;
    int i = threadIdx.x, step = blockDim.x;
    for (; i + (UNROLL - 1) * step < span.vectors; i += UNROLL * step) {
        Vector<X, N> vectors[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) vectors[u] = load_vector<N>(body + (i64)(i + u * step) * N);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            float x[N];
#pragma unroll
            for (int j = 0; j < N; j++) x[j] = vectors[u][j];
            f(x);
        }
    }
    for (; i < span.vectors; i += step) {
        float x[N];
        load<N>(body + (i64)i * N, x);
        f(x);
    }
    if (span.tail + threadIdx.x < n) one(span.tail + threadIdx.x);
}

// The largest of `extent` logits of each row of `n`; minus infinity where a rank holds none.
extern "C" __global__ void __launch_bounds__(512)
ce_max(const X* __restrict__ logits, float* __restrict__ out, int n, int extent) {
    __shared__ float parts[32];
    float res = -INFINITE;
    for_row(logits + (i64)blockIdx.x * n, extent, [&](auto& x) {
#pragma unroll
        for (float it : x) res = fmaxf(res, it);
    });
    res = warp_max(res);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = res;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    res = warp_max(threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : -INFINITE);
    if (threadIdx.x == 0) out[blockIdx.x] = res;
}

// Column of a token's label on this rank; -1 where it has none.
__device__ __forceinline__ int label_column(int label, i64 start, int extent) {
    i64 column = label - start;
    return label >= 0 && column >= 0 && column < extent ? (int)column : -1;
}

// `picked` and `spread` are the weights of the label's logit and of every logit.
extern "C" __global__ void __launch_bounds__(512)
ce_stats(const X* __restrict__ logits, const int* __restrict__ labels, const float* __restrict__ m,
         float* __restrict__ sumexp, float* __restrict__ target, int n, int extent, i64 start,
         f64 picked, f64 spread) {
    const X* row = logits + (i64)blockIdx.x * n;
    float max = m[blockIdx.x];
    f64 sum = 0, all = 0;
    bool smooth = spread != 0;
    for_row(row, extent, [&](auto& x) {
        // At most eight terms in f32, the rest in f64, as the reference sums.
        float exps = 0;
#pragma unroll
        for (float it : x) exps += exponential(it - max);
        sum += exps;
        if (smooth) {
            f64 part = 0;
#pragma unroll
            for (float it : x) part += it;
            all += part;
        }
    });
    sum = block_sum(sum);
    if (smooth) all = block_sum(all);
    if (threadIdx.x != 0) return;
    int column = label_column(labels[blockIdx.x], start, extent);
    f64 logit = column < 0 ? 0.0 : (f64)to_f32(row[column]);
    sumexp[blockIdx.x] = (float)sum;
    target[blockIdx.x] = (float)(picked * logit + spread * all);
}

// Vectors `i`, `i + step`, ... U in all, all read before the first is written.
template <int U, class F>
__device__ __forceinline__ void grad_vectors(const X* from, X* to, int i, int step, F grad) {
    float x[U][N];
#pragma unroll
    for (int u = 0; u < U; u++) load<N>(from + (i64)(i + u * step) * N, x[u]);
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
        for (int j = 0; j < N; j++) x[u][j] = grad(x[u][j]);
        store<N>(to + (i64)(i + u * step) * N, x[u]);
    }
}

// Gradient in the logits; `out` may be the memory of `logits`.
extern "C" __global__ void __launch_bounds__(512)
ce_stats_grad(const X* logits, const int* __restrict__ labels, const float* __restrict__ m,
              const float* __restrict__ dsumexp, const float* __restrict__ dtarget, X* out, int n,
              int extent, i64 start, float picked, float spread) {
    i64 offset = (i64)blockIdx.x * n;
    const X* row = logits + offset;
    X* to = out + offset;
    float max = m[blockIdx.x], factor = dsumexp[blockIdx.x], dlabel = dtarget[blockIdx.x];
    float base = dlabel * spread;
    auto grad = [&](float x) { return factor * exponential(x - max) + base; };
    int column = label_column(labels[blockIdx.x], start, extent);
    // The label's logit is read before it is overwritten, and its gradient rounded once.
    float logit = threadIdx.x == 0 && column >= 0 ? to_f32(row[column]) : 0.0f;
    __syncthreads();

    Span span(row, extent);
    auto one = [&](int i) { to[i] = from_f32<X>(grad(to_f32(row[i]))); };
    if (threadIdx.x < span.head) one(threadIdx.x);
    int i = threadIdx.x, step = blockDim.x;
    const X* body = row + span.head;
    for (; i + step < span.vectors; i += 2 * step) {
        grad_vectors<2>(body, to + span.head, i, step, grad);
    }
    if (i < span.vectors) grad_vectors<1>(body, to + span.head, i, step, grad);
    if (span.tail + threadIdx.x < extent) one(span.tail + threadIdx.x);
    for (int j = extent + threadIdx.x; j < n; j += step) to[j] = from_f32<X>(0.0f);
    __syncthreads();
    if (threadIdx.x == 0 && column >= 0) to[column] = from_f32<X>(grad(logit) + dlabel * picked);
}
