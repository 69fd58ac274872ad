// Parts of rows: `slice_dim`, `pad_dim`, `concat`. Macros: V (u8, u16, u32, uint2 or uint4, in which all
// sizes are counted), INDEX (u32 where that can count both sides, or u64).

#include "common.cuh"

// `row` units of each row of `from`, from `from_first` on, to `to_first` in the row of `to`.
extern "C" __global__ void copy_rows(V* to, const V* from, INDEX row, INDEX to_first, INDEX to_pitch, INDEX from_first,
                                     INDEX from_pitch, INDEX n) {
    INDEX threads = (INDEX)gridDim.x * blockDim.x;
    for (INDEX i = (INDEX)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) {
        INDEX r = i / row, column = i % row;
        to[r * to_pitch + to_first + column] = from[r * from_pitch + from_first + column];
    }
}

// The same with whole rows of `from`, and zeros elsewhere in `to`; n counts the units of `to`.
extern "C" __global__ void pad_rows(V* to, const V* from, INDEX row, INDEX to_first, INDEX to_pitch, INDEX n) {
    INDEX threads = (INDEX)gridDim.x * blockDim.x;
    for (INDEX i = (INDEX)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) {
        INDEX r = i / to_pitch, column = i % to_pitch;
        bool inside = column >= to_first && column - to_first < row;
        V zero = {};
        to[i] = inside ? from[r * row + column - to_first] : zero;
    }
}
