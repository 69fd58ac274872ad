// Results of an elementwise map that may be codes, and whose amaxes may be asked for.
// Macro: AMAX (bit i: takes the amax of result i).
#pragma once

#include "amax.cuh"
#include "codes.cuh"

// Result I of `f` in a map: keeps its largest magnitude in `most` if bit I of AMAX asks for it, and scales it if it
// is to be codes of type Y.
template <int I, class Y> __device__ __forceinline__ void put(float* y, float value, float scale, float* most) {
    if constexpr (AMAX >> I & 1) most[I] = fmaxf(most[I], fabsf(value));
    y[I] = scaled<Y>(value, scale);
}

template <int I, class Type> __device__ __forceinline__ void take(Type* amax, const float* most) {
    if constexpr (AMAX >> I & 1) take_amax(amax, most[I]);
}
