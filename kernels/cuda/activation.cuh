// The functions of `ir::ops::ActivationKind`, and their slopes.

// Within two units in the last place, without the slow path of an exact division.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

struct gelu {
    static __device__ __forceinline__ float apply(float x) { return x * normcdff(x); }
    static __device__ __forceinline__ float slope(float x) {
        return normcdff(x) + x * (expf(-0.5f * x * x) * 0.3989422804014327f);
    }
};

// (1 + tanh(u)) / 2 is sigmoid(2 u).
struct gelu_tanh {
    static constexpr float SLOPE = 0.7978845608028654f, CUBE = 0.044715f;
    static __device__ __forceinline__ float half_of_one_plus_tanh(float x) {
        return sigmoid(2.0f * SLOPE * (x + CUBE * x * x * x));
    }
    static __device__ __forceinline__ float apply(float x) { return x * half_of_one_plus_tanh(x); }
    static __device__ __forceinline__ float slope(float x) {
        float s = half_of_one_plus_tanh(x);
        return s + 2.0f * x * s * (1.0f - s) * (SLOPE * (1.0f + 3.0f * CUBE * x * x));
    }
};

struct relu {
    static __device__ __forceinline__ float apply(float x) { return fmaxf(x, 0.0f); }
    static __device__ __forceinline__ float slope(float x) { return x > 0.0f ? 1.0f : 0.0f; }
};

struct silu {
    static __device__ __forceinline__ float apply(float x) { return x * sigmoid(x); }
    static __device__ __forceinline__ float slope(float x) {
        float s = sigmoid(x);
        return s * (1.0f + x * (1.0f - s));
    }
};

struct srelu {
    static __device__ __forceinline__ float apply(float x) { return fmaxf(x, 0.0f) * fmaxf(x, 0.0f); }
    static __device__ __forceinline__ float slope(float x) { return 2.0f * fmaxf(x, 0.0f); }
};
