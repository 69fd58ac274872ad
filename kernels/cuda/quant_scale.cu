// Scales of FP8 codes, of many tensors: `quant_scale`, `delayed_scale`, `delayed_update`. A warp for each
// tensor. Arithmetic is that of `ir::quant`, operation by operation. Macro: AMAX, the type of
// amaxes.
#include "common.cuh"

constexpr int THREADS = 32;
constexpr float LARGEST = 3.402823466e38f;

// A row of the table: `n` amaxes, or a state, and what is made of it.
template <class From> struct Scale {
    const From* from;
    float* scale;
    float* inverse;
    i64 n;
};

extern "C" __global__ void __launch_bounds__(THREADS)
quant_scale(const Scale<AMAX>* __restrict__ tensors, float largest, float epsilon, int pow2) {
    Scale<AMAX> t = tensors[blockIdx.x];
    for (i64 i = threadIdx.x; i < t.n; i += THREADS) {
        float amax = to_f32(t.from[i]);
        if (amax < epsilon) amax = epsilon;
        float scale = 1.0f;
        if (amax != 0.0f && isfinite(amax)) {
            scale = __fdiv_rn(largest, amax);
            if (isinf(scale)) scale = LARGEST;
            if (pow2) scale = __uint_as_float(__float_as_uint(scale) & 0xff800000u);
        }
        t.scale[i] = scale;
        t.inverse[i] = __fdiv_rn(1.0f, scale);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) delayed_scale(const Scale<float>* __restrict__ tensors) {
    Scale<float> t = tensors[blockIdx.x];
    if (threadIdx.x > 0) return;
    float scale = *t.from;
    if (scale == 0.0f) scale = 1.0f;
    *t.scale = scale;
    *t.inverse = __fdiv_rn(1.0f, scale);
}

// A row of the table. Results may be the memory of operands.
struct History {
    const float* history0;
    const AMAX* amax;
    const float* scale0;
    float* history;
    float* scale;
    i64 n;
};

// `largest` is already divided by the margin.
extern "C" __global__ void __launch_bounds__(THREADS)
delayed_update(const History* __restrict__ tensors, float largest, int most_recent) {
    History t = tensors[blockIdx.x];
    float last = to_f32(*t.amax), previous = *t.scale0;
    if (last == 0.0f) last = t.n > 0 ? t.history0[0] : 0.0f;
    if (previous == 0.0f) previous = 1.0f;
    // Every lane has read them before one writes.
    __syncwarp();
    bool rolls = last != 0.0f;
    float most = rolls ? fmaxf(0.0f, last) : 0.0f;
    for (i64 first = 0; first < t.n; first += THREADS) {
        i64 i = first + threadIdx.x;
        float x = last;
        if (i < t.n && !rolls) x = t.history0[i];
        if (i < t.n - 1 && rolls) x = t.history0[i + 1];
        if (rolls) most = fmaxf(most, x);
        __syncwarp();
        if (i < t.n) t.history[i] = rolls && i == 0 ? 0.0f : x;
    }
    float amax = most_recent ? last : warp_max(most);
    if (threadIdx.x > 0) return;
    bool usable = isfinite(amax) && amax > 0.0f;
    *t.scale = usable ? fminf(__fdiv_rn(largest, amax), LARGEST) : previous;
}
