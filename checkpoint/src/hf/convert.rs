//! Floats of one type as another, rounded to nearest, ties to even; f64 goes through f32, as in PyTorch.

use half::{bf16, f16};

use crate::dtype::StoredType;

/// What a conversion does to values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: the types are the same.
    None,
    /// Every value is one of the other type.
    Exact,
    /// Values are rounded.
    Rounds,
}

/// What it does to values to store `from` as `to`; `None` if there is no such conversion.
pub fn effect(from: StoredType, to: StoredType) -> Option<Effect> {
    use StoredType::{Bf16, F16, F32, F64};
    if from == to {
        return Some(Effect::None);
    }
    let is_float = |it| matches!(it, F64 | F32 | F16 | Bf16);
    if !is_float(from) || !is_float(to) {
        return None;
    }
    match (from, to) {
        (_, F64) | (F16 | Bf16, F32) => Some(Effect::Exact),
        _ => Some(Effect::Rounds),
    }
}

/// Converts elements, little-endian on both sides.
///
/// # Panics
/// If there is no such conversion, or the lengths are not those of as many elements.
pub fn convert(from: StoredType, to: StoredType, bytes: &[u8], out: &mut [u8]) {
    let n = bytes.len() as u64 / from.bytes();
    assert_eq!(n * to.bytes(), out.len() as u64, "as many elements of {to} as of {from}");
    use StoredType::{Bf16, F16, F32, F64};
    match (from, to) {
        _ if from == to => out.copy_from_slice(bytes),
        (Bf16, F32) => map(bytes, out, |it| bf16::from_le_bytes(it).to_f32().to_le_bytes()),
        (F16, F32) => map(bytes, out, |it| f16::from_le_bytes(it).to_f32().to_le_bytes()),
        (F32, Bf16) => map(bytes, out, |it| bf16::from_f32(f32::from_le_bytes(it)).to_le_bytes()),
        (F32, F16) => map(bytes, out, |it| f16::from_f32(f32::from_le_bytes(it)).to_le_bytes()),
        (F32, F64) => map(bytes, out, |it| f64::from(f32::from_le_bytes(it)).to_le_bytes()),
        (Bf16, F64) => map(bytes, out, |it| bf16::from_le_bytes(it).to_f64().to_le_bytes()),
        (F16, F64) => map(bytes, out, |it| f16::from_le_bytes(it).to_f64().to_le_bytes()),
        (Bf16, F16) => {
            map(bytes, out, |it| f16::from_f32(bf16::from_le_bytes(it).to_f32()).to_le_bytes())
        }
        (F16, Bf16) => {
            map(bytes, out, |it| bf16::from_f32(f16::from_le_bytes(it).to_f32()).to_le_bytes())
        }
        (F64, F32) => map(bytes, out, |it| (f64::from_le_bytes(it) as f32).to_le_bytes()),
        (F64, Bf16) => {
            map(bytes, out, |it| bf16::from_f32(f64::from_le_bytes(it) as f32).to_le_bytes())
        }
        (F64, F16) => {
            map(bytes, out, |it| f16::from_f32(f64::from_le_bytes(it) as f32).to_le_bytes())
        }
        _ => unreachable!("{from} is not converted to {to}"),
    }
}

fn map<const N: usize, const M: usize>(
    bytes: &[u8],
    out: &mut [u8],
    value: impl Fn([u8; N]) -> [u8; M],
) {
    let (from, to) = (bytes.as_chunks::<N>().0, out.as_chunks_mut::<M>().0);
    from.iter().zip(to).for_each(|(&it, out)| *out = value(it));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 + 2^-8 lies between two bf16, and goes to the even one; 1 + 3 * 2^-8 as well.
    #[test]
    fn halves_go_to_even() {
        let check = |from: f32, expect: u16| {
            let mut out = [0; 2];
            convert(StoredType::F32, StoredType::Bf16, &from.to_le_bytes(), &mut out);
            assert_eq!(u16::from_le_bytes(out), expect, "{from}");
        };
        check(1.0, 0x3f80);
        check(1.0 + 2f32.powi(-8), 0x3f80);
        check(1.0 + 3.0 * 2f32.powi(-8), 0x3f82);
        check(-1.0 - 2f32.powi(-8) - 2f32.powi(-20), 0xbf81);
        check(f32::INFINITY, 0x7f80);
    }

    #[test]
    fn widening_is_exact_and_goes_back() {
        for from in [StoredType::Bf16, StoredType::F16] {
            for to in [StoredType::F32, StoredType::F64] {
                assert_eq!(effect(from, to), Some(Effect::Exact));
                assert_eq!(effect(to, from), Some(Effect::Rounds));
                // Every finite number of 16 bits.
                let finite = |it: &u16| match from {
                    StoredType::Bf16 => it & 0x7f80 != 0x7f80,
                    _ => it & 0x7c00 != 0x7c00,
                };
                let all: Vec<u8> =
                    (0..=u16::MAX).filter(finite).flat_map(u16::to_le_bytes).collect();
                let mut wide = vec![0; all.len() / 2 * to.bytes() as usize];
                let mut back = vec![0; all.len()];
                convert(from, to, &all, &mut wide);
                convert(to, from, &wide, &mut back);
                assert_eq!(all, back, "{from} {to}");
            }
        }
        assert_eq!(effect(StoredType::Bf16, StoredType::F16), Some(Effect::Rounds));
        assert_eq!(effect(StoredType::I64, StoredType::F32), None);
        assert_eq!(effect(StoredType::E4M3, StoredType::E4M3), Some(Effect::None));
    }
}
