// `transpose`. Macros: V (u8, u16, u32, uint2 or uint4: what is moved at a time), INDEX (u32 where that can
// count the elements, or u64), E (u8, u16 or u32: an element).

#include "codes.cuh"

// A dimension of the result, and the distance of its entries on either side.
struct Dim {
    i64 size, from, to;
};

// Where the last dimension stays the last: rows in another order. Dimensions innermost first, sizes
// and distances counted in V.
extern "C" __global__ void permute_rows(V* to, const V* from, const Dim* dims, int n_dims, INDEX n) {
    INDEX threads = (INDEX)gridDim.x * blockDim.x;
    for (INDEX i = (INDEX)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) {
        INDEX rest = i;
        i64 at = 0;
        for (int d = 0; d < n_dims; d++) {
            INDEX size = (INDEX)dims[d].size;
            at += rest % size * dims[d].from;
            rest /= size;
        }
        to[i] = from[at];
    }
}

// Otherwise: squares of the dimension `i` that is contiguous in `from` and of `j` that is in `to`,
// through shared memory. dims[0] is `i`, dims[1] is `j`, the others are in any order.
extern "C" __global__ void __launch_bounds__(256)
transpose_tiles(E* to, const E* from, const Dim* dims, int n_dims, i64 n_tiles) {
    constexpr int SIDE = 64, LANES = 32, WARPS = 8;
    // The odd number of words in a row keeps a column's elements in different banks.
    __shared__ E tile[SIDE][SIDE + 4 / sizeof(E)];
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    Dim di = dims[0], dj = dims[1];
    i64 tiles_i = (di.size + SIDE - 1) / SIDE, tiles_j = (dj.size + SIDE - 1) / SIDE;
    for (i64 index = blockIdx.x; index < n_tiles; index += gridDim.x) {
        i64 i0 = index % tiles_i * SIDE, j0 = index / tiles_i % tiles_j * SIDE;
        i64 rest = index / tiles_i / tiles_j, from_base = 0, to_base = 0;
        for (int d = 2; d < n_dims; d++) {
            i64 at = rest % dims[d].size;
            rest /= dims[d].size;
            from_base += at * dims[d].from;
            to_base += at * dims[d].to;
        }
#pragma unroll
        for (int y = 0; y < SIDE; y += WARPS) {
#pragma unroll
            for (int x = 0; x < SIDE; x += LANES) {
                i64 i = i0 + x + lane, j = j0 + y + warp;
                if (i < di.size && j < dj.size) tile[y + warp][x + lane] = from[from_base + j * dj.from + i];
            }
        }
        __syncthreads();
#pragma unroll
        for (int y = 0; y < SIDE; y += WARPS) {
#pragma unroll
            for (int x = 0; x < SIDE; x += LANES) {
                i64 i = i0 + y + warp, j = j0 + x + lane;
                if (i < di.size && j < dj.size) to[to_base + i * di.to + j] = tile[x + lane][y + warp];
            }
        }
        __syncthreads();
    }
}

// A matrix of bytes, a block for each square of it.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
transpose_bytes(u8* to, const u8* from, i64 n_rows, i64 n_columns) {
    Place place = square(blockIdx.x, n_columns), at = part_of(place);
    from += at.row * n_columns + at.column;
    int rows = present(n_rows - at.row), columns = present(n_columns - at.column);
    u32 x[EACH][2] = {};
    if (rows > 0 && columns > 0 && n_columns % EACH == 0) {
        // Rows that are missing are the last one again.
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            uint2 row = *reinterpret_cast<const uint2*>(from);
            x[i][0] = row.x, x[i][1] = row.y;
            if (i + 1 < rows) from += n_columns;
        }
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                if (i < rows && j < columns) x[i][j / 4] |= (u32)from[i * n_columns + j] << (8 * (j % 4));
            }
        }
    }
    store_columns(to, x, place, n_rows, n_columns);
}
