//! The formats of quantized elements and scales, bit for bit.
//!
//! ```text
//!        sign exponent mantissa  bias  largest  smallest   infinity  NaN
//! E4M3      1        4        3     7      448  2^-9       none      7f, ff
//! E5M2      1        5        2    15    57344  2^-16      7c, fc    7d..7f, fd..ff
//! E2M1      1        2        1     1        6  1/2        none      none
//! E8M0      0        8        0   127    2^127  2^-127     none      ff
//! ```
//!
//! E4M3 and E5M2 are OCP's 8-bit floats (OFP8, revision 1.0; E4M3 is its "FN" kind), E2M1 and E8M0 those
//! of OCP's MX formats (revision 1.0). Conversions are those of NVIDIA's `cvt.rn.satfinite`, on which
//! TransformerEngine builds: round to nearest, ties to even, saturate. Infinity saturates as well.

use serde::{Deserialize, Serialize};

/// How an element or a scale is stored. A code is the low bits of a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Format {
    /// 8 bits; data that needs precision: activations, weights and scales of blocks of E2M1.
    E4M3,
    /// 8 bits; data that needs range: gradients.
    E5M2,
    /// 4 bits; data with a scale for each 16 elements.
    E2M1,
    /// 8 bits; a scale that is a power of two.
    E8M0,
}

/// Bits of `f32::INFINITY`; more, without the sign, is NaN.
const INFINITY: u32 = 0xff << 23;
const SIGN: u32 = 1 << 31;

impl Format {
    /// Every format.
    pub const ALL: &[Format] = &[Format::E4M3, Format::E5M2, Format::E2M1, Format::E8M0];

    /// The largest number.
    pub const fn max(self) -> f32 {
        match self {
            Format::E4M3 => 448.0,
            Format::E5M2 => 57344.0,
            Format::E2M1 => 6.0,
            Format::E8M0 => f32::from_bits(0xfe << 23),
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> u32 {
        match self {
            Format::E4M3 | Format::E5M2 | Format::E8M0 => 8,
            Format::E2M1 => 4,
        }
    }

    /// The code of the nearest number, of the even code if two are as near. What is larger than
    /// [`max`](Format::max), infinity included, becomes `max`; zero keeps its sign. NaN becomes `7f`, and
    /// 6 in E2M1.
    ///
    /// E8M0 rounds up instead, so that what is divided by the scale cannot overflow, and has no sign:
    /// zero is 2^-127, its smallest number, NaN is `ff`.
    pub const fn encode(self, x: f32) -> u8 {
        match self {
            Format::E4M3 => E4M3.encode(x),
            Format::E5M2 => E5M2.encode(x),
            Format::E2M1 => E2M1.encode(x),
            Format::E8M0 => encode_e8m0(x),
        }
    }

    /// The number of a code; of the low 4 bits of it in E2M1.
    pub fn decode(self, code: u8) -> f32 {
        self.numbers()[usize::from(code)]
    }

    /// [`encode`](Format::encode) of each element. Both slices have one length.
    pub fn encode_into(self, x: &[f32], codes: &mut [u8]) {
        // A loop for each format: with its constants inlined there is no branch left in any.
        match self {
            Format::E4M3 => map(x, codes, |it| E4M3.encode(it)),
            Format::E5M2 => map(x, codes, |it| E5M2.encode(it)),
            Format::E2M1 => map(x, codes, |it| E2M1.encode(it)),
            Format::E8M0 => map(x, codes, encode_e8m0),
        }
    }

    /// [`decode`](Format::decode) of each element. Both slices have one length.
    pub fn decode_into(self, codes: &[u8], x: &mut [f32]) {
        let numbers = self.numbers();
        map(codes, x, |it| numbers[usize::from(it)]);
    }

    /// The number that `x` becomes when it is stored: `decode(encode(x))`.
    pub fn round(self, x: f32) -> f32 {
        self.decode(self.encode(x))
    }

    fn numbers(self) -> &'static [f32; 256] {
        static E4M3S: [f32; 256] = numbers(Format::E4M3);
        static E5M2S: [f32; 256] = numbers(Format::E5M2);
        static E2M1S: [f32; 256] = numbers(Format::E2M1);
        static E8M0S: [f32; 256] = numbers(Format::E8M0);
        match self {
            Format::E4M3 => &E4M3S,
            Format::E5M2 => &E5M2S,
            Format::E2M1 => &E2M1S,
            Format::E8M0 => &E8M0S,
        }
    }
}

/// Two codes of E2M1 per byte, the even element in the low nibble. A row of a matrix must have an even
/// number of elements to be packed on its own.
pub fn pack(codes: &[u8]) -> Vec<u8> {
    codes.chunks(2).map(|it| (it[0] & 0xf) | it.get(1).map_or(0, |high| high << 4)).collect()
}

/// The opposite of [`pack`], for an even number of elements.
pub fn unpack(packed: &[u8]) -> Vec<u8> {
    packed.iter().flat_map(|it| [it & 0xf, it >> 4]).collect()
}

#[inline(always)]
fn map<A: Copy, B>(from: &[A], to: &mut [B], f: impl Fn(A) -> B) {
    assert_eq!(from.len(), to.len(), "a conversion changes no length");
    for (from, to) in from.iter().zip(to) {
        *to = f(*from);
    }
}

/// What distinguishes the signed formats.
#[derive(Clone, Copy)]
struct Float {
    mantissa: u32,
    bias: u32,
    bits: u32,
    max: f32,
    /// What NaN becomes.
    nan: u32,
}

const E4M3: Float = Float { mantissa: 3, bias: 7, bits: 8, max: Format::E4M3.max(), nan: 0x7f };
const E5M2: Float = Float { mantissa: 2, bias: 15, bits: 8, max: Format::E5M2.max(), nan: 0x7f };
const E2M1: Float = Float { mantissa: 1, bias: 1, bits: 4, max: Format::E2M1.max(), nan: 0x7 };

impl Float {
    /// Both roundings are computed and one is selected: loops have no branches.
    #[inline(always)]
    const fn encode(self, x: f32) -> u8 {
        let sign = x.to_bits() & SIGN;
        let abs = x.to_bits() ^ sign;
        let max = self.max.to_bits();
        let clipped = if abs < max { abs } else { max };

        // Numbers of both formats are ordered like their bits, so that a carry out of the mantissa is
        // right. Half a step minus one, and one more if the result is odd, round to even.
        let drop = 23 - self.mantissa;
        let odd = (clipped >> drop) & 1;
        let rounded = (clipped + (1 << (drop - 1)) - 1 + odd) >> drop;
        let normal = rounded.wrapping_sub((127 - self.bias) << self.mantissa);

        // Neighbours of `magic` are as far apart as subnormal numbers, so that the sum is rounded to them.
        let magic = f32::from_bits((127 + 24 - self.bias - self.mantissa) << 23);
        let sum = f32::from_bits(clipped) + magic;
        let subnormal = sum.to_bits() - magic.to_bits();

        let smallest_normal = (128 - self.bias) << 23;
        let code = if clipped < smallest_normal { subnormal } else { normal };
        let code = code | (sign >> (32 - self.bits));
        (if abs > INFINITY { self.nan } else { code }) as u8
    }

    /// Infinity and NaN aside.
    const fn decode(self, code: u8) -> f32 {
        let sign_bit = 1 << (self.bits - 1);
        let magnitude = code as u32 & (sign_bit - 1);
        // With the bias of f32 the bits of a subnormal number are one of f32, which the factor makes right.
        let biased = f32::from_bits(magnitude << (23 - self.mantissa));
        let factor = f32::from_bits((254 - self.bias) << 23);
        let sign = if code as u32 & sign_bit == 0 { 1.0 } else { -1.0 };
        sign * (biased * factor)
    }
}

/// The exponent, and one more if there is a mantissa. What is at most 2^-127 has exponent 0.
/// Source: `float_to_e8m0` of TransformerEngine (`common/util/ptx.cuh`).
#[inline(always)]
const fn encode_e8m0(x: f32) -> u8 {
    let abs = x.to_bits() & !SIGN;
    let smallest = 1 << 22;
    let above = if abs > smallest { (1 << 23) - 1 } else { 0 };
    let exponent = (abs + above) >> 23;
    let exponent = if exponent < 0xfe { exponent } else { 0xfe };
    (if abs > INFINITY { 0xff } else { exponent }) as u8
}

const fn numbers(format: Format) -> [f32; 256] {
    let mut res = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let c = code as u8;
        res[code] = match (format, c & 0x7f) {
            (Format::E4M3, 0x7f) | (Format::E5M2, 0x7d..) => f32::NAN,
            (Format::E4M3, _) => E4M3.decode(c),
            (Format::E5M2, 0x7c) if c == 0x7c => f32::INFINITY,
            (Format::E5M2, 0x7c) => f32::NEG_INFINITY,
            (Format::E5M2, _) => E5M2.decode(c),
            (Format::E2M1, _) => E2M1.decode(c),
            (Format::E8M0, _) if c == 0xff => f32::NAN,
            (Format::E8M0, _) if c == 0 => f32::from_bits(1 << 22),
            (Format::E8M0, _) => f32::from_bits((c as u32) << 23),
        };
        code += 1;
    }
    res
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Codes of finite numbers from the smallest to the largest: those without the sign.
    fn finite(format: Format) -> std::ops::RangeInclusive<u8> {
        match format {
            Format::E4M3 => 0..=0x7e,
            Format::E5M2 => 0..=0x7b,
            Format::E2M1 => 0..=7,
            Format::E8M0 => 0..=0xfe,
        }
    }

    #[test]
    fn every_number_keeps_its_code() {
        for &format in Format::ALL {
            for code in finite(format) {
                let x = format.decode(code);
                assert_eq!(format.encode(x), code, "{format:?} {x}");
                if format != Format::E8M0 {
                    let negative = code | 1 << (format.bits() - 1);
                    assert_eq!(format.decode(negative), -x, "{format:?}");
                    assert_eq!(format.encode(-x), negative, "{format:?} {x}");
                }
            }
            assert_eq!(format.decode(*finite(format).end()), format.max());
        }
    }

    #[test]
    fn codes_grow_with_numbers() {
        for &format in Format::ALL {
            let numbers: Vec<f32> = finite(format).map(|it| format.decode(it)).collect();
            assert!(numbers.is_sorted_by(|a, b| a < b), "{format:?}: {numbers:?}");
        }
    }

    #[test]
    fn slices_convert_like_elements() {
        let x: Vec<f32> = (0..1 << 16).map(|it| f32::from_bits(it << 16 | 0x8000)).collect();
        for &format in Format::ALL {
            let (mut codes, mut back) = (vec![0; x.len()], vec![0.0; x.len()]);
            format.encode_into(&x, &mut codes);
            format.decode_into(&codes, &mut back);
            for ((&x, &code), back) in x.iter().zip(&codes).zip(back) {
                assert_eq!(format.encode(x), code, "{format:?} {x}");
                assert_eq!(format.round(x).to_bits(), back.to_bits(), "{format:?} {x}");
            }
        }
    }

    #[test]
    fn the_even_element_is_the_low_nibble() {
        assert_eq!(pack(&[1, 2, 0xf, 0]), [0x21, 0x0f]);
        assert_eq!(unpack(&[0x21, 0x0f]), [1, 2, 0xf, 0]);
    }

    /// Half of all numbers of f32 are far outside of what a format holds; these are in or near it.
    fn near(format: Format) -> impl Strategy<Value = f32> {
        let tie = finite(format).prop_map(move |it| {
            let next = finite(format).end().min(&(it + 1)).to_owned();
            (format.decode(it) + format.decode(next)) / 2.0
        });
        let ulps = (tie, -2..=2i32)
            .prop_map(|(x, ulps)| f32::from_bits(x.to_bits().saturating_add_signed(ulps)));
        prop_oneof![any::<u32>().prop_map(f32::from_bits), -600.0..600.0f32, ulps]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn the_nearest_number_is_taken_and_of_two_the_even_one(
            (format, x) in prop::sample::select(&[Format::E4M3, Format::E5M2, Format::E2M1][..])
                .prop_flat_map(|it| (Just(it), near(it)))
        ) {
            prop_assume!(!x.is_nan());
            let clipped = f64::from(x.abs().min(format.max()));
            let distance = |code: u8| (f64::from(format.decode(code)) - clipped).abs();
            let nearest = finite(format)
                .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
                .unwrap();
            let sign = u8::from(x.is_sign_negative()) << (format.bits() - 1);
            prop_assert_eq!(format.encode(x), sign | nearest, "{:?} {:e}", format, x);
        }

        #[test]
        fn a_scale_is_rounded_up(x in near(Format::E8M0)) {
            let x = x.abs().min(Format::E8M0.max());
            let up = finite(Format::E8M0).find(|&it| Format::E8M0.decode(it) >= x).unwrap();
            prop_assert_eq!(Format::E8M0.encode(x), up, "{:e}", x);
        }
    }
}
