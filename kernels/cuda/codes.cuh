// FP8 codes as `ir::quant::format` defines them, and squares of codes whose columns become rows.
// Macro where codes are made: CODE (e4m3 or e5m2).
#pragma once
#include "common.cuh"

struct e4m3 {
    u8 bits;
};
struct e5m2 {
    u8 bits;
};

// Two numbers as codes, `low` in the lower byte: nearest, ties to even, held to the largest number; NaN
// becomes 7f.
template <class Code> __device__ __forceinline__ u32 pack_codes(float low, float high);
template <> __device__ __forceinline__ u32 pack_codes<e4m3>(float low, float high) {
    u16 res;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(res) : "f"(high), "f"(low));
    return res;
}
template <> __device__ __forceinline__ u32 pack_codes<e5m2>(float low, float high) {
    u16 res;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(res) : "f"(high), "f"(low));
    return res;
}

// The numbers of codes: of f16 all are.
__device__ __forceinline__ float lower_half(u32 word) {
    float res;
    asm("cvt.f32.f16 %0, %1;" : "=f"(res) : "h"((u16)word));
    return res;
}
__device__ __forceinline__ float to_f32(e4m3 x) {
    u32 res;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(res) : "h"((u16)x.bits));
    return lower_half(res);
}
__device__ __forceinline__ float to_f32(e5m2 x) {
    u32 res;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(res) : "h"((u16)x.bits));
    return lower_half(res);
}

// Four numbers as codes in one word, the first in the lowest byte.
template <class Code> __device__ __forceinline__ u32 codes_of(const float* x, float scale) {
    u32 low = pack_codes<Code>(__fmul_rn(x[0], scale), __fmul_rn(x[1], scale));
    u32 high = pack_codes<Code>(__fmul_rn(x[2], scale), __fmul_rn(x[3], scale));
    return low | high << 16;
}

// A result that is codes where asked for: whether it is, and what type its amax has, which is that of the result as it
// is stored, or f32 of codes.
template <class Type> struct Made {
    static constexpr bool codes = false;
    typedef Type amax;
};
template <> struct Made<e4m3> {
    static constexpr bool codes = true;
    typedef float amax;
};
template <> struct Made<e5m2> {
    static constexpr bool codes = true;
    typedef float amax;
};

// The scale of a result: of codes only is there one.
template <class Type> __device__ __forceinline__ float scale_of(const float* scale) {
    if constexpr (Made<Type>::codes) return *scale;
    return 1.0f;
}

// What a store rounds, if the result is `x`.
template <class Type> __device__ __forceinline__ float scaled(float x, float scale) {
    return Made<Type>::codes ? __fmul_rn(x, scale) : x;
}

// Rounds and writes Length elements, as `store` of `common.cuh` does for other types.
template <int Length, class Code> __device__ __forceinline__ void store_codes(Code* at, const float* x) {
    Vector<Code, Length> codes;
    if constexpr (Length % 2 == 0) {
#pragma unroll
        for (int i = 0; i < Length; i += 2) {
            u32 pair = pack_codes<Code>(x[i], x[i + 1]);
            codes.element[i].bits = (u8)pair;
            codes.element[i + 1].bits = (u8)(pair >> 8);
        }
    } else {
#pragma unroll
        for (int i = 0; i < Length; i++) codes.element[i].bits = (u8)pack_codes<Code>(x[i], 0.0f);
    }
    *reinterpret_cast<Vector<Code, Length>*>(at) = codes;
}
template <int Length> __device__ __forceinline__ void store(e4m3* at, const float* x) { store_codes<Length>(at, x); }
template <int Length> __device__ __forceinline__ void store(e5m2* at, const float* x) { store_codes<Length>(at, x); }

// A square of codes is the work of a block of TILE_THREADS threads, each of which holds eight rows of
// eight: with those beside it, whole lines of 128 bytes.
constexpr int SIDE = 128, EACH = 8, TILE_THREADS = (SIDE / EACH) * (SIDE / EACH);

// What a thread holds of a square: its place in the matrix.
struct Place {
    i64 row, column;
};

__device__ __forceinline__ Place square(i64 index, i64 n_columns) {
    i64 across = (n_columns + SIDE - 1) / SIDE;
    return {index / across * SIDE, index % across * SIDE};
}

__device__ __forceinline__ Place part_of(Place square) {
    i64 row = threadIdx.x / (SIDE / EACH) * EACH, column = threadIdx.x % (SIDE / EACH) * EACH;
    return {square.row + row, square.column + column};
}

// How many of EACH there are, of which `left` are in the matrix or `-left` outside.
__device__ __forceinline__ int present(i64 left) { return (int)min(max(left, 0ll), (i64)EACH); }

// Bytes i of four words as word i.
__device__ __forceinline__ void transpose_words(u32 a, u32 b, u32 c, u32 d, u32* out) {
    u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    out[0] = __byte_perm(ab, cd, 0x5410);
    out[1] = __byte_perm(ab, cd, 0x7632);
    ab = __byte_perm(a, b, 0x7362), cd = __byte_perm(c, d, 0x7362);
    out[2] = __byte_perm(ab, cd, 0x5410);
    out[3] = __byte_perm(ab, cd, 0x7632);
}

// Writes the square at `at` of a matrix [n_rows, n_columns] to its transpose. `codes` are the thread's own.
// Once in a kernel.
__device__ __forceinline__ void store_columns(u8* to, const u32 (&codes)[EACH][2], Place at, i64 n_rows,
                                              i64 n_columns) {
    // Eight rows of a column are neighbours; which eight is xored with a number of the column, so that
    // neither side has two lanes in one bank.
    __shared__ alignas(16) uint2 tile[SIDE][SIDE / EACH];
    int group = threadIdx.x % (SIDE / EACH), rows = threadIdx.x / (SIDE / EACH);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 upper[4], lower[4];
        transpose_words(codes[0][half], codes[1][half], codes[2][half], codes[3][half], upper);
        transpose_words(codes[4][half], codes[5][half], codes[6][half], codes[7][half], lower);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            tile[group * EACH + half * 4 + i][rows ^ group] = make_uint2(upper[i], lower[i]);
        }
    }
    __syncthreads();
    // Sixteen rows at a time, of which the first eight come second where the number of the column is odd.
#pragma unroll
    for (int i = threadIdx.x; i < SIDE * (SIDE / 16); i += TILE_THREADS) {
        int column = i / (SIDE / 16), part = i % (SIDE / 16), number = column / EACH;
        uint4 x = *reinterpret_cast<const uint4*>(&tile[column][(part ^ number >> 1) * 2]);
        if (number & 1) x = make_uint4(x.z, x.w, x.x, x.y);
        i64 row = at.row + part * 16;
        if (at.column + column >= n_columns || row >= n_rows) continue;
        u8* out = to + (at.column + column) * n_rows + row;
        if (n_rows % 16 == 0) {
            *reinterpret_cast<uint4*>(out) = x;
        } else {
            u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 16; j++) {
                if (row + j < n_rows) out[j] = (u8)(words[j / 4] >> (8 * (j % 4)));
            }
        }
    }
}
