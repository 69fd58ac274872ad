//! What stored elements are as numbers, to compare and to show them.

use super::StoredType;

impl StoredType {
    /// The numbers that an element is: two for a complex one or a pair of FP4 codes, else one and 0.
    ///
    /// # Panics
    /// If these are more than 16 bytes.
    pub fn numbers(self, bytes: &[u8]) -> [f64; 2] {
        let mut wide = [0; 16];
        wide[..bytes.len()].copy_from_slice(bytes);
        let all = u128::from_le_bytes(wide);
        let bits = all as u64;
        let one = |it: f64| [it, 0.0];
        match self {
            StoredType::F64 => one(f64::from_bits(bits)),
            StoredType::F32 => one(f32::from_bits(bits as u32).into()),
            StoredType::Bf16 => one(f32::from_bits((bits as u32) << 16).into()),
            StoredType::F16 => one(Small::F16.value(bits)),
            StoredType::E4M3 => one(Small::E4M3.value(bits)),
            StoredType::E5M2 => one(Small::E5M2.value(bits)),
            StoredType::E4M3Fnuz => one(Small::E4M3_FNUZ.value(bits)),
            StoredType::E5M2Fnuz => one(Small::E5M2_FNUZ.value(bits)),
            StoredType::E8M0 if bits == 0xff => one(f64::NAN),
            StoredType::E8M0 => one(2f64.powi(bits as i32 - 127)),
            StoredType::E2M1x2 => [Small::E2M1.value(bits & 0xf), Small::E2M1.value(bits >> 4)],
            StoredType::I64 => one(bits as i64 as f64),
            StoredType::I32 => one((bits as i32).into()),
            StoredType::I16 => one((bits as i16).into()),
            StoredType::I8 => one((bits as i8).into()),
            StoredType::U64 => one(bits as f64),
            StoredType::U32 | StoredType::U16 | StoredType::U8 | StoredType::Bool => {
                one(bits as f64)
            }
            StoredType::Complex32 => {
                [Small::F16.value(bits & 0xffff), Small::F16.value(bits >> 16)]
            }
            StoredType::Complex64 => {
                [f32::from_bits(bits as u32).into(), f32::from_bits((bits >> 32) as u32).into()]
            }
            StoredType::Complex128 => [f64::from_bits(bits), f64::from_bits((all >> 64) as u64)],
        }
    }
}

/// A format of few bits: sign, exponent, mantissa.
struct Small {
    exponent: u32,
    mantissa: u32,
    bias: i32,
    special: Special,
}

/// Which codes are no numbers.
#[derive(PartialEq)]
enum Special {
    /// The largest exponent, as IEEE 754 says.
    Ieee,
    /// All bits set.
    AllOnes,
    /// The negative zero.
    NegativeZero,
    /// None.
    None,
}

impl Small {
    const F16: Small = Small { exponent: 5, mantissa: 10, bias: 15, special: Special::Ieee };
    const E5M2: Small = Small { exponent: 5, mantissa: 2, bias: 15, special: Special::Ieee };
    const E4M3: Small = Small { exponent: 4, mantissa: 3, bias: 7, special: Special::AllOnes };
    const E5M2_FNUZ: Small =
        Small { exponent: 5, mantissa: 2, bias: 16, special: Special::NegativeZero };
    const E4M3_FNUZ: Small =
        Small { exponent: 4, mantissa: 3, bias: 8, special: Special::NegativeZero };
    const E2M1: Small = Small { exponent: 2, mantissa: 1, bias: 1, special: Special::None };

    fn value(&self, code: u64) -> f64 {
        let magnitude = code & ((1 << (self.exponent + self.mantissa)) - 1);
        let sign = if code >> (self.exponent + self.mantissa) == 0 { 1.0 } else { -1.0 };
        let mantissa = magnitude & ((1 << self.mantissa) - 1);
        let exponent = magnitude >> self.mantissa;
        let top = (1 << self.exponent) - 1;
        let all_ones = exponent == top && mantissa == (1 << self.mantissa) - 1;
        match self.special {
            Special::Ieee if exponent == top && mantissa == 0 => return sign * f64::INFINITY,
            Special::Ieee if exponent == top => return f64::NAN,
            Special::AllOnes if all_ones => return f64::NAN,
            Special::NegativeZero if magnitude == 0 && sign < 0.0 => return f64::NAN,
            _ => {}
        }
        let (fraction, exponent) = match exponent {
            0 => (mantissa as f64, 1),
            it => ((mantissa + (1 << self.mantissa)) as f64, it as i32),
        };
        sign * fraction * 2f64.powi(exponent - self.bias - self.mantissa as i32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(dtype: StoredType, bytes: &[u8], expect: f64) {
        let found = dtype.numbers(bytes)[0];
        assert!(found == expect || found.is_nan() && expect.is_nan(), "{dtype}: {found}");
    }

    /// Largest, smallest and special codes of each format, from its definition.
    #[test]
    fn small_formats_are_decoded() {
        check(StoredType::F16, &[0xff, 0x7b], 65504.0);
        check(StoredType::F16, &[1, 0], 2f64.powi(-24));
        check(StoredType::F16, &[0, 0xfc], f64::NEG_INFINITY);
        check(StoredType::E4M3, &[0x7e], 448.0);
        check(StoredType::E4M3, &[0xff], f64::NAN);
        check(StoredType::E4M3, &[1], 2f64.powi(-9));
        check(StoredType::E5M2, &[0x7b], 57344.0);
        check(StoredType::E4M3Fnuz, &[0x7f], 240.0);
        check(StoredType::E4M3Fnuz, &[0x80], f64::NAN);
        check(StoredType::E5M2Fnuz, &[0x7f], 57344.0);
        check(StoredType::E8M0, &[128], 2.0);
        check(StoredType::E2M1x2, &[0x7f], -6.0);
        check(StoredType::Bf16, &[0x80, 0xbf], -1.0);
        check(StoredType::I16, &[0xfe, 0xff], -2.0);
    }
}
