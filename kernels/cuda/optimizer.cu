// One step of an optimizer over many tensors in one launch.
//
// Macros: P, M, V, G, the element types of parameters, first and second moments and gradients;
// COMPUTE, that of the copy of the new parameters, if there is one; MOMENTUM for `sgd` with a buffer,
// which takes the place of the first moment; AMAX (1 takes the amax of
// each new parameter: of each chunk, which `largest` puts together).
//
// Arithmetic is that of the references in ir::ops, operation by operation: no multiply-add is fused.
// What a table says of the tensors is fixed; what changes from step to step is read from the device.
#include "amax.cuh"

#ifndef COMPUTE
#define COMPUTE float
constexpr bool HAS_COMPUTE = false;
#else
constexpr bool HAS_COMPUTE = true;
#endif
#ifndef AMAX
#define AMAX 0
#endif
constexpr int THREADS = 256;
// Elements of a block; `CHUNK` on the host's side.
constexpr int CHUNK = 32768;

// A row of the table. Results may be the memory of operands.
struct Tensor {
    const P* p0;
    const M* m0;
    const V* v0;
    const G* g;
    P* p;
    M* m;
    V* v;
    COMPUTE* compute;
    P* amax;
    i64 n;
    f64 decay;
    i64 first_chunk;
    // How often `p` was updated, for the Adams.
    const float* t0;
    float* t;
};

// N neighbouring elements of each tensor. STATES says how many of p, m, v there are.
template <int STATES, int N, class F>
__device__ __forceinline__ void group(const Tensor& t, i64 i, F update) {
    float p[N], m[N], v[N], g[N];
    load<N>(t.p0 + i, p);
    load<N>(t.g + i, g);
    if constexpr (STATES > 1) load<N>(t.m0 + i, m);
    if constexpr (STATES > 2) load<N>(t.v0 + i, v);
#pragma unroll
    for (int j = 0; j < N; j++) update(p[j], m[j], v[j], g[j]);
    store<N>(t.p + i, p);
    if constexpr (STATES > 1) store<N>(t.m + i, m);
    if constexpr (STATES > 2) store<N>(t.v + i, v);
    if constexpr (HAS_COMPUTE) store<N>(t.compute + i, p);
}

// `update` of every element of a chunk.
template <int STATES, class F>
__device__ __forceinline__ void sweep(const Tensor& t, u32 chunk, F update) {
    i64 first = (i64)chunk * CHUNK, end = min(first + CHUNK, t.n);
    for (i64 i = first + threadIdx.x * 4; i < end; i += THREADS * 4) {
        if (i + 4 <= end) {
            group<STATES, 4>(t, i, update);
        } else {
            for (; i < end; i++) group<STATES, 1>(t, i, update);
        }
    }
}

struct AdamStep {
    float scale, weight1, beta2, weight2, rate, root, eps;

    // The next moments for a gradient, and by how much the parameter falls.
    __device__ __forceinline__ float next(float& m, float& v, float g) const {
        m = __fadd_rn(m, __fmul_rn(weight1, __fsub_rn(g, m)));
        v = __fadd_rn(__fmul_rn(beta2, v), __fmul_rn(__fmul_rn(weight2, g), g));
        float size = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), root), eps);
        return __fdiv_rn(__fmul_rn(rate, m), size);
    }
};

// `t0` is the number of updates before this one.
__device__ __forceinline__ AdamStep adam_step(const float* scale, const float* lr, const float* t0,
                                              f64 beta1, f64 beta2, float eps) {
    __shared__ float biases[2];
    if (threadIdx.x == 0) {
        f64 t = (f64)*t0 + 1.0;
        biases[0] = (float)((f64)*lr / (1.0 - pow(beta1, t)));
        biases[1] = (float)sqrt(1.0 - pow(beta2, t));
    }
    __syncthreads();
    return {*scale, (float)(1.0 - beta1), (float)beta2, (float)(1.0 - beta2), biases[0], biases[1], eps};
}

// Leaves the largest magnitude of a chunk.
__device__ __forceinline__ void leave(float* parts, float most) {
    if constexpr (AMAX) {
        most = block_max(most);
        if (threadIdx.x == 0) parts[blockIdx.x] = most;
    }
}

// The amax of each tensor, from those of its chunks: a block for each.
extern "C" __global__ void __launch_bounds__(THREADS)
largest(const Tensor* __restrict__ tensors, const float* __restrict__ parts) {
    Tensor t = tensors[blockIdx.x];
    i64 n = (t.n + CHUNK - 1) / CHUNK;
    float res = 0.0f;
    for (i64 i = threadIdx.x; i < n; i += THREADS) res = fmaxf(res, parts[t.first_chunk + i]);
    res = block_max(res);
    if (threadIdx.x == 0) *t.amax = from_f32<P>(res);
}

// A block for each (tensor, chunk) pair, here and below.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw(const Tensor* __restrict__ tensors, const uint2* __restrict__ chunks,
      const float* __restrict__ scale, const float* __restrict__ lr, const float* __restrict__ applied,
      f64 beta1, f64 beta2, float eps, float* __restrict__ parts) {
    uint2 chunk = chunks[blockIdx.x];
    Tensor t = tensors[chunk.x];
    AdamStep adam = adam_step(scale, lr, t.t0, beta1, beta2, eps);
    bool applies = *applied == 1.0f;
    float most = 0.0f;
    float keep = (float)__dsub_rn(1.0, __dmul_rn((f64)*lr, t.decay));
    sweep<3>(t, chunk.y, [&](float& p, float& m, float& v, float g) {
        if (applies) {
            float fall = adam.next(m, v, __fmul_rn(g, adam.scale));
            p = __fsub_rn(__fmul_rn(p, keep), fall);
        }
        if constexpr (AMAX) most = fmaxf(most, fabsf(p));
    });
    leave(parts, most);
}

extern "C" __global__ void __launch_bounds__(THREADS)
adam(const Tensor* __restrict__ tensors, const uint2* __restrict__ chunks,
     const float* __restrict__ scale, const float* __restrict__ lr, const float* __restrict__ applied,
     f64 beta1, f64 beta2, float eps, float* __restrict__ parts) {
    uint2 chunk = chunks[blockIdx.x];
    Tensor t = tensors[chunk.x];
    AdamStep adam = adam_step(scale, lr, t.t0, beta1, beta2, eps);
    bool applies = *applied == 1.0f;
    float most = 0.0f;
    float decay = (float)t.decay;
    sweep<3>(t, chunk.y, [&](float& p, float& m, float& v, float g) {
        if (applies) {
            g = __fadd_rn(__fmul_rn(g, adam.scale), __fmul_rn(decay, p));
            p = __fsub_rn(p, adam.next(m, v, g));
        }
        if constexpr (AMAX) most = fmaxf(most, fabsf(p));
    });
    leave(parts, most);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sgd(const Tensor* __restrict__ tensors, const uint2* __restrict__ chunks,
    const float* __restrict__ scale, const float* __restrict__ lr, const float* __restrict__ applied,
    float momentum) {
    uint2 chunk = chunks[blockIdx.x];
    Tensor t = tensors[chunk.x];
    float decay = (float)t.decay, factor = *scale, rate = *lr;
    bool applies = *applied == 1.0f;
#ifdef MOMENTUM
    sweep<2>(t, chunk.y, [&](float& p, float& m, float&, float g) {
        if (applies) {
            float fall = __fadd_rn(__fmul_rn(g, factor), __fmul_rn(decay, p));
            m = __fadd_rn(__fmul_rn(momentum, m), fall);
            p = __fsub_rn(p, __fmul_rn(rate, m));
        }
    });
#else
    sweep<1>(t, chunk.y, [&](float& p, float&, float&, float g) {
        if (applies) {
            float fall = __fadd_rn(__fmul_rn(g, factor), __fmul_rn(decay, p));
            p = __fsub_rn(p, __fmul_rn(rate, fall));
        }
    });
#endif
}

// Counts the update of each tensor of an Adam: a thread for each.
extern "C" __global__ void __launch_bounds__(THREADS)
count(const Tensor* __restrict__ tensors, const float* __restrict__ applied, i64 n) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) *tensors[i].t = *tensors[i].t0 + (*applied == 1.0f ? 1.0f : 0.0f);
}
