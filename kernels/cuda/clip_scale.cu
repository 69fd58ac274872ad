// The factor of gradients of the summed loss, and whether they are applied: one thread. No macros.
#include "common.cuh"

// `max_norm` is NaN where there is no limit.
extern "C" __global__ void clip_scale(const float* __restrict__ sumsq, const float* __restrict__ count,
                                      const float* __restrict__ loss, float* __restrict__ scale,
                                      float* __restrict__ grad_norm, float* __restrict__ applied,
                                      f64 max_norm) {
    f64 n = fmax((f64)*count, 1.0);
    f64 norm = sqrt((f64)*sumsq) / n;
    f64 ratio = isnan(max_norm) ? 1.0 : max_norm / (norm + 1e-6);
    // Written so that a norm that is no number gives a scale that is none.
    f64 clip = ratio > 1.0 ? 1.0 : ratio;
    *scale = (float)(clip / n);
    *grad_norm = (float)norm;
    *applied = isfinite(norm) && isfinite(*loss) ? (*count > 0.0f ? 1.0f : 0.0f)
                                                  : __int_as_float(0x7fc00000);
}
