// The loss of all tokens that count and their number, and the gradients. No macros.
#include "common.cuh"

constexpr int THREADS = 1024;

// One block: each thread sums its tokens in order, then the block its threads in order.
extern "C" __global__ void __launch_bounds__(THREADS)
ce_loss(const float* __restrict__ m, const float* __restrict__ sumexp,
        const float* __restrict__ target, const int* __restrict__ labels, float* loss_sum,
        float* count, i64 n, i64 ignore) {
    __shared__ f64 losses[THREADS], counts[THREADS];
    f64 loss = 0, counted = 0;
    for (i64 i = threadIdx.x; i < n; i += THREADS) {
        if (labels[i] == ignore) continue;
        loss += (f64)m[i] + log((f64)sumexp[i]) - (f64)target[i];
        counted += 1;
    }
    losses[threadIdx.x] = loss;
    counts[threadIdx.x] = counted;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x >= half) continue;
        losses[threadIdx.x] += losses[threadIdx.x + half];
        counts[threadIdx.x] += counts[threadIdx.x + half];
    }
    if (threadIdx.x != 0) return;
    *loss_sum = (float)losses[0];
    *count = (float)counts[0];
}

// `dsumexp` may be the memory of `sumexp`.
extern "C" __global__ void __launch_bounds__(256)
ce_loss_grad(const float* sumexp, const int* __restrict__ labels, const float* __restrict__ dloss,
             float* dsumexp, float* __restrict__ dtarget, i64 n, i64 ignore) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    bool counts = labels[i] != ignore;
    float grad = counts ? *dloss : 0.0f;
    dsumexp[i] = counts ? grad / sumexp[i] : 0.0f;
    dtarget[i] = -grad;
}
