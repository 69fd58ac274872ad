// Pieces: ranges of dimensions that have a scale, or an amax, of their own.
#pragma once
#include "common.cuh"

// How the position of an element decides along one dimension: entry `element / stride % size` is in piece
// number `/ part` of `n`. Outermost first in the scale.
struct PieceDim {
    i64 stride, size, part, n;
};

// Where the scale of element `element` is.
__device__ __forceinline__ i64 piece_of(const PieceDim* dims, int n_dims, i64 element) {
    i64 res = 0;
    for (int d = 0; d < n_dims; d++) {
        PieceDim dim = dims[d];
        res = res * dim.n + element / dim.stride % dim.size / dim.part;
    }
    return res;
}
