// FP8 codes of many tensors with a scale for each block: of 1 x 128, of 128 x 1, both from one read, or of
// 128 x 128. Arithmetic is that of `ir::quant::scale`, operation by operation.
// Macros: X, the tensors' element type; CODE (e4m3 or e5m2); ALIGNED (1 if vectors divide all rows, or 0);
// ROWS, COLUMNS, SQUARE (1 or 0: copies that there are, and whether blocks are squares).
#include "codes.cuh"

constexpr int WARPS = TILE_THREADS / 32, GROUPS = SIDE / EACH;

// A row of the table: a matrix, and copies of its codes with their inverse scales, one of which may be missing;
// what is behind the rows and columns held is padding.
struct Matrix {
    const X* x;
    u8* rows;
    float* row_scales;
    u8* columns;
    float* column_scales;
    i64 n_rows, n_columns, held_rows, held_columns;
};

// `ScaleRule`, without epsilon.
struct Rule {
    float largest, overflow;
    bool pow2;
    __device__ __forceinline__ float scale(float amax) const {
        if (amax == 0.0f || !isfinite(amax)) return 1.0f;
        float res = __fdiv_rn(largest, amax);
        if (isinf(res)) res = overflow;
        return pow2 ? __uint_as_float(__float_as_uint(res) & 0xff800000u) : res;
    }
};

// Of each of 2 * Half numbers the larger one of a pair of lanes; the lane with the bit set has the upper half.
template <int Half> __device__ __forceinline__ void larger_half(float* x, int bit) {
    bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < Half; i++) {
        float keep = upper ? x[i + Half] : x[i], give = upper ? x[i] : x[i + Half];
        x[i] = fmaxf(keep, __shfl_xor_sync(~0u, give, bit));
    }
}

// Writes the rows that there are of a thread's part.
__device__ __forceinline__ void store_rows(u8* to, const u32 (&codes)[EACH][2], int n_rows, i64 n_columns) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (i < n_rows) *reinterpret_cast<uint2*>(to + i * n_columns) = make_uint2(codes[i][0], codes[i][1]);
    }
}

// A block for each (tensor, square) pair; of one tensor there is no list of them.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, sizeof(X) == 2 ? 3 : 2)
quantize_blocks(const Matrix* __restrict__ tensors, const uint2* __restrict__ squares, float largest,
                float overflow, int pow2) {
    uint2 which = squares ? squares[blockIdx.x] : make_uint2(0, blockIdx.x);
    Matrix t = tensors[which.x];
    Rule rule = {largest, overflow, pow2 != 0};
    Place place = square(which.y, t.n_columns), at = part_of(place);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = threadIdx.x % GROUPS;
    // Rows and columns of this thread that there are. What is missing is zero, or a row again.
    int n_rows = present(t.n_rows - at.row), n_columns = present(t.n_columns - at.column);
    Vector<X, EACH> x[EACH] = {};
    if (n_rows > 0 && n_columns > 0) {
        const X* from = t.x + at.row * t.n_columns + at.column;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if constexpr (ALIGNED) {
                x[i] = load_vector<EACH>(from);
                if (i + 1 < n_rows) from += t.n_columns;
            } else {
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    if (i < n_rows && j < n_columns) x[i].element[j] = from[i * t.n_columns + j];
                }
            }
        }
    }
    u32 codes[EACH][2];
    if constexpr (SQUARE) {
        __shared__ float parts[WARPS];
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int j = 0; j < EACH; j++) amax = fmaxf(amax, fabsf(x[i][j]));
        }
        amax = warp_max(amax);
        if (lane == 0) parts[warp] = amax;
        __syncthreads();
        float scale = rule.scale(warp_max(parts[lane % WARPS]));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float row[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j++) row[j] = x[i][j];
            codes[i][0] = codes_of<CODE>(row, scale);
            codes[i][1] = codes_of<CODE>(row + 4, scale);
        }
        if (threadIdx.x == 0) {
            i64 i = place.row / SIDE, j = place.column / SIDE;
            bool held = place.row < t.held_rows && place.column < t.held_columns;
            float inverse = held ? __fdiv_rn(1.0f, scale) : 0.0f;
            if (ROWS) t.row_scales[i * (t.n_columns / SIDE) + j] = inverse;
            if (COLUMNS) t.column_scales[j * (t.n_rows / SIDE) + i] = inverse;
        }
        if constexpr (ROWS) store_rows(t.rows + at.row * t.n_columns + at.column, codes, n_rows, t.n_columns);
    } else {
        __shared__ alignas(16) float parts[COLUMNS ? WARPS : 1][SIDE];
        __shared__ alignas(16) float scales[SIDE];
        if constexpr (COLUMNS) {
            float amax[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                amax[j] = fabsf(x[0][j]);
#pragma unroll
                for (int i = 1; i < EACH; i++) amax[j] = fmaxf(amax[j], fabsf(x[i][j]));
            }
            larger_half<EACH / 2>(amax, 16);
            *reinterpret_cast<float4*>(&parts[warp][group * EACH + lane / GROUPS * (EACH / 2)]) =
                make_float4(amax[0], amax[1], amax[2], amax[3]);
        }
        if constexpr (ROWS) {
            float amax[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                amax[i] = fabsf(x[i][0]);
#pragma unroll
                for (int j = 1; j < EACH; j++) amax[i] = fmaxf(amax[i], fabsf(x[i][j]));
            }
            larger_half<4>(amax, 4);
            larger_half<2>(amax, 2);
            larger_half<1>(amax, 1);
            // Of row `lane % EACH`, in two lanes.
            float scale = rule.scale(fmaxf(amax[0], __shfl_xor_sync(~0u, amax[0], 8)));
            if (group < n_rows) {
                t.row_scales[place.column / SIDE * t.n_rows + at.row + group] = __fdiv_rn(1.0f, scale);
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float row[EACH], factor = __shfl_sync(~0u, scale, i, GROUPS);
#pragma unroll
                for (int j = 0; j < EACH; j++) row[j] = x[i][j];
                codes[i][0] = codes_of<CODE>(row, factor);
                codes[i][1] = codes_of<CODE>(row + 4, factor);
            }
            store_rows(t.rows + at.row * t.n_columns + at.column, codes, n_rows, t.n_columns);
        }
        if constexpr (COLUMNS) {
            __syncthreads();
            if (threadIdx.x < SIDE) {
                float amax = parts[0][threadIdx.x];
#pragma unroll
                for (int i = 1; i < WARPS; i++) amax = fmaxf(amax, parts[i][threadIdx.x]);
                float scale = rule.scale(amax);
                scales[threadIdx.x] = scale;
                i64 column = place.column + threadIdx.x;
                if (column < t.n_columns) {
                    t.column_scales[place.row / SIDE * t.n_columns + column] = __fdiv_rn(1.0f, scale);
                }
            }
            __syncthreads();
            float factors[EACH];
            load<4>(scales + group * EACH, factors);
            load<4>(scales + group * EACH + 4, factors + 4);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float row[EACH];
#pragma unroll
                for (int j = 0; j < EACH; j++) row[j] = __fmul_rn(x[i][j], factors[j]);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 low = pack_codes<CODE>(row[4 * half], row[4 * half + 1]);
                    codes[i][half] = low | pack_codes<CODE>(row[4 * half + 2], row[4 * half + 3]) << 16;
                }
            }
        }
    }
    if constexpr (COLUMNS) store_columns(t.columns, codes, place, t.n_rows, t.n_columns);
}
