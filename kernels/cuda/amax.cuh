// The amax of what a kernel makes: each block takes its share into a number that was zeroed before.
#pragma once

#include "common.cuh"

// The largest over a block of `blockDim.x` threads (a multiple of 32) of numbers that are not negative, in every
// thread.
__device__ __forceinline__ float block_max(float x) {
    __shared__ float parts[32];
    int lane = threadIdx.x % 32;
    x = warp_max(x);
    // The numbers of an earlier call have been read by all before they are overwritten.
    __syncthreads();
    if (lane == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_max(lane < blockDim.x / 32 ? parts[lane] : 0.0f);
}

// Numbers that are not negative are ordered as their bits. Most blocks find a larger one there already.
__device__ __forceinline__ void raise(float* to, float x) {
    if (x > *(volatile float*)to) atomicMax((int*)to, __float_as_int(x));
}
__device__ __forceinline__ void raise(bf16* to, float x) {
    u16* at = &to->bits;
    u16 wanted = from_f32<bf16>(x).bits, seen = *(volatile u16*)at;
    while (wanted > seen) {
        u16 before = atomicCAS(at, seen, wanted);
        if (before == seen) return;
        seen = before;
    }
}

// Takes the largest magnitude of each thread of a block into `*to`, rounded as the tensor is.
template <class X> __device__ __forceinline__ void take_amax(X* to, float magnitude) {
    magnitude = block_max(magnitude);
    if (threadIdx.x == 0) raise(to, magnitude);
}
