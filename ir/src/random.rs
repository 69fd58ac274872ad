//! Random numbers that depend on what they are for, and not on who draws them.
//!
//! Philox4x32-10 is a function, not a state: element `i` of the tensor with stream `s` under a seed
//! is always the same number, so initial weights and dropout masks are those of one rank on any
//! mesh (report C57).

/// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    const M: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const W: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..10 {
        let (p0, p1) = (M[0] * u64::from(c0), M[1] * u64::from(c2));
        (c0, c1, c2, c3) =
            ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        (k0, k1) = (k0.wrapping_add(W[0]), k1.wrapping_add(W[1]));
    }
    [c0, c1, c2, c3]
}

/// The random numbers of one tensor: element `i` is lane `i % 4` of counter `(i / 4, key)` under
/// the seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// What the user chose, and what changes from step to step.
    pub seed: u64,
    /// Which tensor: see [`stream_key`].
    pub key: u64,
}

impl Stream {
    /// 32 random bits for element `index`.
    pub fn word(self, index: u64) -> u32 {
        let block = index / 4;
        let counter =
            [block as u32, (block >> 32) as u32, self.key as u32, (self.key >> 32) as u32];
        philox4x32_10(counter, [self.seed as u32, (self.seed >> 32) as u32])[(index % 4) as usize]
    }

    /// Element `index` uniform on `[0, 1)`, a multiple of 2^-32.
    pub fn uniform(self, index: u64) -> f64 {
        f64::from(self.word(index)) / 2f64.powi(32)
    }

    /// Element `index` of a standard normal, by Box and Muller from two words of its own.
    pub fn normal(self, index: u64) -> f64 {
        let (u, v) = (self.word(2 * index), self.word(2 * index + 1));
        // On (0, 1], so that the logarithm is finite.
        let u = (f64::from(u) + 1.0) / 2f64.powi(32);
        let v = f64::from(v) / 2f64.powi(32);
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }
}

/// The key of a tensor's stream: FNV-1a of its name, which is stable over versions.
pub fn stream_key(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' library, Random123 (`kat_vectors`).
    #[test]
    fn philox_is_that_of_random123() {
        let ones = u32::MAX;
        let cases = [
            ([0; 4], [0; 2], [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]),
            ([ones; 4], [ones; 2], [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]),
            (
                [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
                [0xa4093822, 0x299f31d0],
                [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
            ),
        ];
        for (counter, key, expect) in cases {
            assert_eq!(philox4x32_10(counter, key), expect, "counter {counter:x?}, key {key:x?}");
        }
    }

    /// Known answers of the FNV-1a reference, 64 bits.
    #[test]
    fn keys_are_fnv1a() {
        assert_eq!(stream_key(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(stream_key("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(stream_key("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let stream = Stream { seed: 1, key: stream_key("w") };
        let n = 1 << 16;
        let moments = |draw: &dyn Fn(u64) -> f64| {
            let mean = (0..n).map(draw).sum::<f64>() / n as f64;
            (mean, (0..n).map(|it| (draw(it) - mean).powi(2)).sum::<f64>() / n as f64)
        };
        // Five standard errors: 5 / sqrt(2^16) = 0.02 for the normal, less for the uniform.
        let (mean, variance) = moments(&|it| stream.normal(it));
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
        let (mean, variance) = moments(&|it| stream.uniform(it));
        assert!((mean - 0.5).abs() < 0.02 && (variance - 1.0 / 12.0).abs() < 0.01);
    }

    #[test]
    fn streams_and_seeds_differ() {
        let word = |seed, name| Stream { seed, key: stream_key(name) }.word(0);
        assert_ne!(word(1, "a"), word(1, "b"));
        assert_ne!(word(1, "a"), word(2, "a"));
    }
}
