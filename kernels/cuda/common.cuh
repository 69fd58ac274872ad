// What all kernels share: element types, vectors of up to 16 bytes, elementwise maps, reductions.
//
// Compiled by NVRTC without include folders, so bf16 is done by hand. Arithmetic is in f32 whatever
// the element type; a store rounds once, to nearest even. Element types come as macros whose values
// are the names of `ir::DType`: f32, bf16, i32; those of codes are in `codes.cuh`.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
typedef float f32;
typedef double f64;

// The upper half of an f32.
struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(int x) { return __int2float_rn(x); }
__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <class Type> __device__ __forceinline__ Type from_f32(float x);
template <> __device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ int from_f32<int>(float x) { return __float2int_rn(x); }
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x) {
    bf16 res;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(res.bits) : "f"(x));
    return res;
}

// Two values as bf16 in one word, `low` in the lower half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 res;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(res) : "f"(high), "f"(low));
    return res;
}

// The value that a store of `x` as a `Type` leaves.
template <class Type> __device__ __forceinline__ float rounded(float x) { return to_f32(from_f32<Type>(x)); }

constexpr int max_of(int a, int b) { return a > b ? a : b; }

// Elements of a vector: 16 bytes of the widest of these types.
template <class... Type> __device__ constexpr int vector_length() {
    int widest = 1;
    ((widest = max_of(widest, (int)sizeof(Type))), ...);
    return 16 / widest;
}

// Length neighbouring elements as they lie in memory, at an address that is a multiple of their size.
template <class Type, int Length>
struct alignas(sizeof(Type) * Length > 16 ? 16 : sizeof(Type) * Length) Vector {
    Type element[Length];
    __device__ __forceinline__ float operator[](int i) const { return to_f32(element[i]); }
};

template <int Length, class Type> __device__ __forceinline__ Vector<Type, Length> load_vector(const Type* at) {
    return *reinterpret_cast<const Vector<Type, Length>*>(at);
}

// Reads Length elements.
template <int Length, class Type> __device__ __forceinline__ void load(const Type* at, float* out) {
    Vector<Type, Length> vector = load_vector<Length>(at);
#pragma unroll
    for (int i = 0; i < Length; i++) out[i] = vector[i];
}

// Rounds and writes Length elements.
template <int Length, class Type> __device__ __forceinline__ void store(Type* at, const float* x) {
    Vector<Type, Length> vector;
    if constexpr (sizeof(Type) == 2 && Length % 2 == 0) {
        u32 words[Length / 2];
#pragma unroll
        for (int i = 0; i < Length / 2; i++) words[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < Length; i++) vector.element[i].bits = (u16)(words[i / 2] >> (16 * (i % 2)));
    } else {
#pragma unroll
        for (int i = 0; i < Length; i++) vector.element[i] = from_f32<Type>(x[i]);
    }
    *reinterpret_cast<Vector<Type, Length>*>(at) = vector;
}

// Operands or results of a map.
template <class... Type> struct Tensors {
    static constexpr int count = 0;
    template <int Length> __device__ __forceinline__ void load_at(i64, float (*)[Length]) const {}
    template <int Length> __device__ __forceinline__ void store_at(i64, const float (*)[Length]) const {}
};
template <class Type, class... Rest> struct Tensors<Type, Rest...> {
    Type* first;
    Tensors<Rest...> rest;
    static constexpr int count = 1 + sizeof...(Rest);
    template <int Length> __device__ __forceinline__ void load_at(i64 at, float (*x)[Length]) const {
        load<Length>(first + at, x[0]);
        rest.template load_at<Length>(at, x + 1);
    }
    template <int Length> __device__ __forceinline__ void store_at(i64 at, const float (*x)[Length]) const {
        store<Length>(first + at, x[0]);
        rest.template store_at<Length>(at, x + 1);
    }
};

__device__ __forceinline__ Tensors<> tensors() { return {}; }
template <class Type, class... Rest>
__device__ __forceinline__ Tensors<Type, Rest...> tensors(Type* first, Rest*... rest) {
    return {first, tensors(rest...)};
}

// `f(x, y, i)` for element `i` of Length from `at` on, in each of Unroll places `stride` apart. All loads come
// before the stores, to have many in flight; a result may be the memory of an operand.
template <int Unroll, int Length, class Out, class In, class F>
__device__ __forceinline__ void map_at(i64 at, i64 stride, Out out, In in, F f) {
    float x[Unroll][In::count + 1][Length], y[Unroll][Out::count][Length];
#pragma unroll
    for (int u = 0; u < Unroll; u++) in.template load_at<Length>(at + u * stride, x[u]);
#pragma unroll
    for (int u = 0; u < Unroll; u++) {
#pragma unroll
        for (int i = 0; i < Length; i++) {
            float from[In::count + 1], to[Out::count];
#pragma unroll
            for (int k = 0; k < In::count; k++) from[k] = x[u][k][i];
            f(from, to, i);
#pragma unroll
            for (int k = 0; k < Out::count; k++) y[u][k][i] = to[k];
        }
    }
#pragma unroll
    for (int u = 0; u < Unroll; u++) out.template store_at<Length>(at + u * stride, y[u]);
}

// Every element of tensors of `n` elements: `each` takes one of each operand to one of each result.
// Unroll vectors a thread at a time.
template <int Length, int Unroll, class Out, class In, class F>
__device__ __forceinline__ void map(i64 n, Out out, In in, F each) {
    auto f = [&](const float* x, float* y, int) { each(x, y); };
    i64 stride = (i64)blockDim.x * Length;
    for (i64 first = blockIdx.x * stride * Unroll; first < n; first += gridDim.x * stride * Unroll) {
        i64 at = first + threadIdx.x * Length;
        if (at + (Unroll - 1) * stride + Length <= n) {
            map_at<Unroll, Length>(at, stride, out, in, f);
            continue;
        }
#pragma unroll 1
        for (int u = 0; u < Unroll; u++, at += stride) {
            if (at + Length <= n) {
                map_at<1, Length>(at, 0, out, in, f);
            } else {
                for (i64 i = at; i < n; i++) map_at<1, 1>(i, 0, out, in, f);
            }
        }
    }
}

// The sum over a warp, in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

// The sums over a block of `blockDim.x` threads (a multiple of 32) of Length values each, in every thread.
template <int Length> __device__ __forceinline__ void block_sum(float (&x)[Length]) {
    __shared__ float parts[Length][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
#pragma unroll
    for (int i = 0; i < Length; i++) x[i] = warp_sum(x[i]);
    // The sums of an earlier call have been read by all before they are overwritten.
    __syncthreads();
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < Length; i++) parts[i][warp] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Length; i++) x[i] = warp_sum(lane < n_warps ? parts[i][lane] : 0.0f);
}

__device__ __forceinline__ float block_sum(float x) {
    float sums[1] = {x};
    block_sum(sums);
    return sums[0];
}

__device__ __forceinline__ f64 block_sum(f64 x) {
    __shared__ f64 parts[32];
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    // The sums of an earlier call have been read by all before they are overwritten.
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    f64 res = 0;
    for (int i = 0; i < blockDim.x / 32; i++) res += parts[i];
    return res;
}
