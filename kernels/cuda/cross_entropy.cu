// Cross entropy: a block for each token's row of logits, which each kernel reads once.
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

// `f` on all elements of a row in arrays of N or 1; `keep` gets each whole vector as it is.
template <class Keep, class F>
__device__ __forceinline__ void for_row(const X* row, int n, Keep keep, F f) {
    Span span(row, n);
    auto whole = [&](int i, const Vector<X, N>& vector) {
        keep(i, vector);
        float x[N];
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = vector[j];
        f(x);
    };
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
        for (int u = 0; u < UNROLL; u++) whole(i + u * step, vectors[u]);
    }
    for (; i < span.vectors; i += step) whole(i, load_vector<N>(body + (i64)i * N));
    if (span.tail + threadIdx.x < n) one(span.tail + threadIdx.x);
}

template <class F> __device__ __forceinline__ void for_row(const X* row, int n, F f) {
    for_row(row, n, [](int, const Vector<X, N>&) {}, f);
}

// The largest of a block's values, in every thread; once in a kernel.
__device__ __forceinline__ float block_max(float x) {
    __shared__ float parts[32];
    x = warp_max(x);
    int lane = threadIdx.x % 32;
    if (lane == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_max(lane < blockDim.x / 32 ? parts[lane] : -INFINITE);
}

// The largest of `extent` logits of each row of `n`; minus infinity where a rank holds none.
extern "C" __global__ void __launch_bounds__(512)
ce_max(const X* __restrict__ logits, float* __restrict__ out, int n, int extent) {
    float res = -INFINITE;
    for_row(logits + (i64)blockIdx.x * n, extent, [&](auto& x) {
#pragma unroll
        for (float it : x) res = fmaxf(res, it);
    });
    res = block_max(res);
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

// Vectors `first` to `end`, which start at `from` and `to`.
template <class F>
__device__ __forceinline__ void grad_body(const X* from, X* to, int first, int end, F grad) {
    int i = first + threadIdx.x, step = blockDim.x;
    for (; i + step < end; i += 2 * step) grad_vectors<2>(from, to, i, step, grad);
    if (i < end) grad_vectors<1>(from, to, i, step, grad);
}

// What a row of `n` elements has in front of its whole vectors and behind them.
template <class F>
__device__ __forceinline__ void grad_ends(const X* row, X* to, int n, Span span, F grad) {
    auto one = [&](int i) { to[i] = from_f32<X>(grad(to_f32(row[i]))); };
    if (threadIdx.x < span.head) one(threadIdx.x);
    if (span.tail + threadIdx.x < n) one(span.tail + threadIdx.x);
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
    grad_ends(row, to, extent, span, grad);
    grad_body(row + span.head, to + span.head, 0, span.vectors, grad);
    for (int j = extent + threadIdx.x; j < n; j += blockDim.x) to[j] = from_f32<X>(0.0f);
    __syncthreads();
    if (threadIdx.x == 0 && column >= 0) to[column] = from_f32<X>(grad(logit) + dlabel * picked);
}

// The sum of a thread's exponentials, relative to the largest logit so far.
struct Exponentials {
    // Finite, so that a difference of two infinities does not come about.
    float max = -3.402823466e38f;
    f64 sum = 0;

    __device__ __forceinline__ void relative_to(float larger) {
        sum *= exponential(max - larger);
        max = larger;
    }

    template <int Length> __device__ __forceinline__ void add(const float (&x)[Length]) {
        float largest = x[0];
#pragma unroll
        for (float it : x) largest = fmaxf(largest, it);
        if (largest > max) relative_to(largest);
        // At most eight terms in f32, the rest in f64, as the reference sums.
        float part = 0;
#pragma unroll
        for (float it : x) part += exponential(it - max);
        sum += part;
    }
};

// What a row of `n` zeros is.
__device__ __forceinline__ void zero_row(X* to, int n) {
    Span span(to, n);
    float zeros[N] = {};
    if (threadIdx.x < span.head) to[threadIdx.x] = from_f32<X>(0.0f);
    for (int i = threadIdx.x; i < span.vectors; i += blockDim.x) {
        store<N>(to + span.head + (i64)i * N, zeros);
    }
    if (span.tail + threadIdx.x < n) to[span.tail + threadIdx.x] = from_f32<X>(0.0f);
}

// What `ce_max`, `ce_stats` and, for a gradient of the loss of 1, `ce_stats_grad` give, of whole rows;
// nothing but zeros in `out` for the ignored label. `out` may be the memory of `logits`.
//
// A row's first `kept` vectors wait in shared memory for the gradient. The others are read again, first
// of all, when the second-level cache still has them.
extern "C" __global__ void __launch_bounds__(1024)
cross_entropy(const X* logits, const int* __restrict__ labels, X* out, float* __restrict__ m,
              float* __restrict__ sumexp, float* __restrict__ target, int n, int kept, i64 ignore,
              f64 picked, f64 spread) {
    extern __shared__ uint4 memory[];
    X* shared = reinterpret_cast<X*>(memory);
    i64 offset = (i64)blockIdx.x * n;
    const X* row = logits + offset;
    X* to = out + offset;
    int label = labels[blockIdx.x];
    if (label == ignore) return zero_row(to, n);
    int column = label_column(label, 0, n);
    float logit = threadIdx.x == 0 && column >= 0 ? to_f32(row[column]) : 0.0f;

    Exponentials exps;
    f64 all = 0;
    bool smooth = spread != 0;
    auto keep = [&](int i, const Vector<X, N>& vector) {
        if (i < kept) reinterpret_cast<Vector<X, N>*>(memory)[i] = vector;
    };
    for_row(row, n, keep, [&](auto& x) {
        exps.add(x);
        if (smooth) {
            f64 part = 0;
#pragma unroll
            for (float it : x) part += it;
            all += part;
        }
    });
    // All reads of the row come before this, and all writes after it.
    float max = block_max(exps.max);
    exps.relative_to(max);
    float sum = (float)block_sum(exps.sum);
    if (smooth) all = block_sum(all);

    float factor = 1.0f / sum, base = -(float)spread;
    auto grad = [&](float x) { return factor * exponential(x - max) + base; };
    Span span(row, n);
    kept = min(kept, span.vectors);
    grad_body(row + span.head, to + span.head, kept, span.vectors, grad);
    grad_ends(row, to, n, span, grad);
    grad_body(shared, to + span.head, 0, kept, grad);
    __syncthreads();
    if (threadIdx.x != 0) return;
    // Rounded once.
    if (column >= 0) to[column] = from_f32<X>(grad(logit) - (float)picked);
    m[blockIdx.x] = max;
    sumexp[blockIdx.x] = sum;
    target[blockIdx.x] = (float)(picked * logit + spread * all);
}
