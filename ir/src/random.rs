//! Philox4x32-10: a random function of a counter and a key, the same on every machine.
//!
//! Random values are not drawn in sequence: the counter is a global element index, so that an
//! element is the same whichever rank makes it, on any mesh. The algorithm is that of Salmon et al.,
//! "Parallel random numbers: as easy as 1, 2, 3" (2011).

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// Four random words for each counter and key.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..ROUNDS {
        let (low0, high0) = product(MULTIPLIERS[0], c[0]);
        let (low1, high1) = product(MULTIPLIERS[1], c[2]);
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// The lower and the upper half of `a * b`.
fn product(a: u32, b: u32) -> (u32, u32) {
    let wide = u64::from(a) * u64::from(b);
    (wide as u32, (wide >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(counter: [u32; 4], key: [u32; 2], expect: [u32; 4]) {
        assert_eq!(philox4x32_10(counter, key), expect);
    }

    /// `philox4x32 10` of Random123's `kat_vectors`.
    #[test]
    fn agrees_with_the_known_answers_of_random123() {
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = u32::MAX;
        check([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }
}
