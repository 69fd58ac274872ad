// The factor of gradients of the summed loss: one thread. No macros.
#include "common.cuh"

// `max_norm` is the bits of an f64, or those of a NaN where there is no limit.
extern "C" __global__ void clip_scale(const float* __restrict__ sumsq, const float* __restrict__ count,
                                      float* __restrict__ scale, float* __restrict__ grad_norm,
                                      i64 max_norm) {
    f64 limit = __longlong_as_double(max_norm), n = fmax((f64)*count, 1.0);
    f64 norm = sqrt((f64)*sumsq) / n;
    f64 ratio = isnan(limit) ? 1.0 : limit / (norm + 1e-6);
    // Written so that a norm that is no number gives a scale that is none.
    f64 clip = ratio > 1.0 ? 1.0 : ratio;
    *scale = (float)(clip / n);
    *grad_norm = (float)norm;
}
