// The factor of gradients of the summed loss, and whether they are applied, by one thread; and whether all numbers of
// tensors are finite, by one block. No macros.
#include "common.cuh"

// `max_norm` is NaN where there is no limit.
extern "C" __global__ void clip_scale(const float* __restrict__ sumsq, const float* __restrict__ count,
                                      const float* __restrict__ loss, float* __restrict__ scale,
                                      float* __restrict__ grad_norm, float* __restrict__ applied,
                                      f64 max_norm, const float* const* __restrict__ watched, int n_watched) {
    f64 n = fmax((f64)*count, 1.0);
    f64 norm = sqrt((f64)*sumsq) / n;
    f64 ratio = isnan(max_norm) ? 1.0 : max_norm / (norm + 1e-6);
    // Written so that a norm that is no number gives a scale that is none.
    f64 clip = ratio > 1.0 ? 1.0 : ratio;
    *scale = (float)(clip / n);
    *grad_norm = (float)norm;
    bool finite = isfinite(norm) && isfinite(*loss);
    for (int i = 0; i < n_watched; i++) finite = finite && isfinite(*watched[i]);
    *applied = finite ? (*count > 0.0f ? 1.0f : 0.0f) : __int_as_float(0x7fc00000);
}

// A tensor, and its element type: 0 f32, 1 bf16.
struct Watched {
    const void* at;
    u64 dtype;
};

// 0 if all of the first `n` numbers of each tensor are finite, else NaN.
extern "C" __global__ void watch(float* __restrict__ result, const Watched* __restrict__ tensors, int n_tensors, i64 n) {
    bool finite = true;
    for (i64 i = threadIdx.x; i < n_tensors * n; i += blockDim.x) {
        Watched it = tensors[i / n];
        float x = it.dtype == 0 ? ((const f32*)it.at)[i % n] : to_f32(((const bf16*)it.at)[i % n]);
        finite = finite && isfinite(x);
    }
    finite = __syncthreads_and(finite);
    if (threadIdx.x == 0) *result = finite ? 0.0f : __int_as_float(0x7fc00000);
}
