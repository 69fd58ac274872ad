// What all kernels share: element types, vectors of up to 16 bytes, elementwise maps, reductions.
//
// Compiled by NVRTC without include folders, so bf16 is done by hand. Arithmetic is in f32 whatever
// the element type; a store rounds once, to nearest even. Element types come as macros whose values
// are the names of `ir::DType`: f32, bf16, i32.

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

template <class T> __device__ __forceinline__ T from_f32(float x);
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

// The value that a store of `x` as a `T` leaves.
template <class T> __device__ __forceinline__ float rounded(float x) { return to_f32(from_f32<T>(x)); }

constexpr int max_of(int a, int b) { return a > b ? a : b; }

// Elements of a vector: 16 bytes of the widest of these types.
template <class... T> __device__ constexpr int vector_length() {
    int widest = 1;
    ((widest = max_of(widest, (int)sizeof(T))), ...);
    return 16 / widest;
}

// N neighbouring elements as they lie in memory, at an address that is a multiple of their size.
template <class T, int N> struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Vector {
    T element[N];
    __device__ __forceinline__ float operator[](int i) const { return to_f32(element[i]); }
};

template <int N, class T> __device__ __forceinline__ Vector<T, N> load_vector(const T* at) {
    return *reinterpret_cast<const Vector<T, N>*>(at);
}

// Reads N elements.
template <int N, class T> __device__ __forceinline__ void load(const T* at, float* out) {
    Vector<T, N> vector = load_vector<N>(at);
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = vector[i];
}

// Rounds and writes N elements.
template <int N, class T> __device__ __forceinline__ void store(T* at, const float* x) {
    Vector<T, N> vector;
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        u32 words[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) words[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < N; i++) vector.element[i].bits = (u16)(words[i / 2] >> (16 * (i % 2)));
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) vector.element[i] = from_f32<T>(x[i]);
    }
    *reinterpret_cast<Vector<T, N>*>(at) = vector;
}

// Operands or results of a map.
template <class... T> struct Tensors {
    static constexpr int count = 0;
    template <int N> __device__ __forceinline__ void load_at(i64, float (*)[N]) const {}
    template <int N> __device__ __forceinline__ void store_at(i64, const float (*)[N]) const {}
};
template <class T, class... Rest> struct Tensors<T, Rest...> {
    T* first;
    Tensors<Rest...> rest;
    static constexpr int count = 1 + sizeof...(Rest);
    template <int N> __device__ __forceinline__ void load_at(i64 at, float (*x)[N]) const {
        load<N>(first + at, x[0]);
        rest.template load_at<N>(at, x + 1);
    }
    template <int N> __device__ __forceinline__ void store_at(i64 at, const float (*x)[N]) const {
        store<N>(first + at, x[0]);
        rest.template store_at<N>(at, x + 1);
    }
};

__device__ __forceinline__ Tensors<> tensors() { return {}; }
template <class T, class... Rest>
__device__ __forceinline__ Tensors<T, Rest...> tensors(T* first, Rest*... rest) {
    return {first, tensors(rest...)};
}

// `f(x, y)` for element `at` and the next N - 1 in each of U places `stride` apart. All loads come
// before the stores, to have many in flight; a result may be the memory of an operand.
template <int U, int N, class Out, class In, class F>
__device__ __forceinline__ void map_at(i64 at, i64 stride, Out out, In in, F f) {
    float x[U][In::count + 1][N], y[U][Out::count][N];
#pragma unroll
    for (int u = 0; u < U; u++) in.template load_at<N>(at + u * stride, x[u]);
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float from[In::count + 1], to[Out::count];
#pragma unroll
            for (int k = 0; k < In::count; k++) from[k] = x[u][k][i];
            f(from, to);
#pragma unroll
            for (int k = 0; k < Out::count; k++) y[u][k][i] = to[k];
        }
    }
#pragma unroll
    for (int u = 0; u < U; u++) out.template store_at<N>(at + u * stride, y[u]);
}

// Every element of tensors of `n` elements: `f` takes one of each operand to one of each result.
// U vectors a thread at a time; `kernels::cuda::launch::MAP_UNROLL` on the host's side.
template <int N, int U, class Out, class In, class F>
__device__ __forceinline__ void map(i64 n, Out out, In in, F f) {
    i64 stride = (i64)blockDim.x * N;
    for (i64 first = blockIdx.x * stride * U; first < n; first += gridDim.x * stride * U) {
        i64 at = first + threadIdx.x * N;
        if (at + (U - 1) * stride + N <= n) {
            map_at<U, N>(at, stride, out, in, f);
            continue;
        }
#pragma unroll 1
        for (int u = 0; u < U; u++, at += stride) {
            if (at + N <= n) {
                map_at<1, N>(at, 0, out, in, f);
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

// The sums over a block of `blockDim.x` threads (a multiple of 32) of N values each, in every thread.
template <int N> __device__ __forceinline__ void block_sum(float (&x)[N]) {
    __shared__ float parts[N][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = warp_sum(x[i]);
    // The sums of an earlier call have been read by all before they are overwritten.
    __syncthreads();
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < N; i++) parts[i][warp] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = warp_sum(lane < n_warps ? parts[i][lane] : 0.0f);
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
