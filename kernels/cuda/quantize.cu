// FP8 codes of many tensors: in the order of the tensor, with columns first, or both from one read.
// Macros: X, the tensors' element type; CODE (e4m3 or e5m2); ALIGNED (1 if vectors divide all rows, or 0); SUM (1: sums
// the columns of the one tensor).
#include "codes.cuh"
#include "pieces.cuh"

constexpr int THREADS = TILE_THREADS;
// Elements of a block that needs no columns; `CHUNK` on the host's side.
constexpr int CHUNK = 32768;

// A row of the table: a matrix, and copies of its codes, one of which may be missing.
struct Matrix {
    const X* x;
    const float* scale;
    u8* rows;
    u8* columns;
    i64 n_rows, n_columns;
};

// A block for each (tensor, chunk) pair.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_rows(const Matrix* __restrict__ tensors, const uint2* __restrict__ chunks) {
    uint2 chunk = chunks[blockIdx.x];
    Matrix t = tensors[chunk.x];
    constexpr int N = 16 / sizeof(X), STEP = THREADS * N, AHEAD = 4;
    i64 first = (i64)chunk.y * CHUNK, end = min(first + CHUNK, t.n_rows * t.n_columns);
    i64 i = first + threadIdx.x * N;
    float scale = *t.scale;
    for (; i + (AHEAD - 1) * STEP + N <= end; i += AHEAD * STEP) {
        Vector<X, N> x[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) x[u] = load_vector<N>(t.x + i + u * STEP);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            Vector<u32, N / 4> codes;
#pragma unroll
            for (int j = 0; j < N; j += 4) {
                float four[4] = {x[u][j], x[u][j + 1], x[u][j + 2], x[u][j + 3]};
                codes.element[j / 4] = codes_of<CODE>(four, scale);
            }
            *reinterpret_cast<Vector<u32, N / 4>*>(t.rows + i + u * STEP) = codes;
        }
    }
    for (; i < end; i += STEP) {
        i64 n = min(end - i, (i64)N);
        for (int j = 0; j < n; j++) {
            t.rows[i + j] = (u8)pack_codes<CODE>(__fmul_rn(to_f32(t.x[i + j]), scale), 0.0f);
        }
    }
}

// Row n of `parts` [, n_columns] becomes the sums of columns of the n-th row of squares. `sum` are the thread's own.
// Once in a kernel.
__device__ __forceinline__ void store_sums(float* parts, const float (&sum)[EACH], Place at, i64 n_columns) {
    constexpr int ACROSS = SIDE / EACH, WARPS = THREADS / 32;
    static_assert(ACROSS == 16, "a warp holds eight rows twice");
    __shared__ float sums[WARPS][SIDE];
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        float both = sum[j] + __shfl_down_sync(~0u, sum[j], ACROSS);
        if (lane < ACROSS) sums[threadIdx.x / 32][lane * EACH + j] = both;
    }
    __syncthreads();
    i64 column = at.column + threadIdx.x;
    if (threadIdx.x >= SIDE || column >= n_columns) return;
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) total += sums[k][threadIdx.x];
    parts[at.row / SIDE * n_columns + column] = total;
}

// A block for each (tensor, square) pair; of one tensor there is no list of them.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
quantize_squares(const Matrix* __restrict__ tensors, const uint2* __restrict__ squares, float* parts) {
    uint2 which = squares ? squares[blockIdx.x] : make_uint2(0, blockIdx.x);
    Matrix t = tensors[which.x];
    Place place = square(which.y, t.n_columns), at = part_of(place);
    // Rows and columns of this thread that there are.
    int n_rows = present(t.n_rows - at.row), n_columns = present(t.n_columns - at.column);
    u32 codes[EACH][2] = {};
    float sum[EACH] = {};
    if (n_rows > 0 && n_columns > 0) {
        const X* from = t.x + at.row * t.n_columns + at.column;
        float scale = *t.scale;
        if constexpr (ALIGNED) {
            // All loads come first, to have many in flight. Rows that are missing are the last one again.
            Vector<X, EACH> x[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                x[i] = load_vector<EACH>(from);
                if (i + 1 < n_rows) from += t.n_columns;
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float row[EACH];
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    row[j] = x[i][j];
                    if (SUM && i < n_rows) sum[j] += row[j];
                }
                codes[i][0] = codes_of<CODE>(row, scale);
                codes[i][1] = codes_of<CODE>(row + 4, scale);
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float row[EACH] = {};
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    if (i < n_rows && j < n_columns) row[j] = to_f32(from[i * t.n_columns + j]);
                    if (SUM) sum[j] += row[j];
                }
                codes[i][0] = codes_of<CODE>(row, scale);
                codes[i][1] = codes_of<CODE>(row + 4, scale);
            }
        }
    }
    if (t.rows && n_columns > 0) {
        u8* to = t.rows + at.row * t.n_columns + at.column;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (i >= n_rows) continue;
            if constexpr (ALIGNED) {
                *reinterpret_cast<uint2*>(to + i * t.n_columns) = make_uint2(codes[i][0], codes[i][1]);
            } else {
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    if (j < n_columns) to[i * t.n_columns + j] = (u8)(codes[i][j / 4] >> (8 * (j % 4)));
                }
            }
        }
    }
    if constexpr (SUM) {
        store_sums(parts, sum, place, t.n_columns);
        if (!t.columns) return;
    }
    store_columns(t.columns, codes, place, t.n_rows, t.n_columns);
}

// One tensor of which several pieces have scales of their own. For tests: elements are read one by one.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_pieces(const X* __restrict__ x, const float* __restrict__ scale, u8* rows, u8* columns, i64 n_rows,
                i64 n_columns, const PieceDim* __restrict__ dims, int n_dims) {
    i64 n = n_rows * n_columns, threads = (i64)gridDim.x * THREADS;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < n; i += threads) {
        float factor = scale[piece_of(dims, n_dims, i)];
        u8 code = (u8)pack_codes<CODE>(__fmul_rn(to_f32(x[i]), factor), 0.0f);
        if (rows) rows[i] = code;
        if (columns) columns[i % n_columns * n_rows + i / n_columns] = code;
    }
}
