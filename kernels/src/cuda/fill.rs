//! Launches for tensors of one value: `fill` and `zeros_like`.

use ir::quant::Format;
use ir::{DType, Op};

use crate::cuda::launch::{BLOCK, blocks, bytes, elements, launch, program, result, size};
use crate::cuda::{Arg, Function, OpCall, Operand, Pointer, Program, Unsupported, Work};

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let value = match call.op {
        Op::Fill(it) => it.value.0,
        Op::ZerosLike(_) => 0.0,
        _ => return Err(Unsupported::new(call, "it does not make a constant")),
    };
    let out = &call.results[0];
    let bits = word(value as f32, out.dtype);
    Ok(program([match bits {
        0 => zeros(0, out),
        bits => constant(bits, out),
    }]))
}

/// Zeros as result `index`.
pub(super) fn zeros(index: usize, out: &Operand) -> Work {
    Work::Fill { to: Pointer::Result(index as u32), bytes: bytes(out), value: 0 }
}

fn constant(bits: u32, out: &Operand) -> Work {
    let element = match out.dtype.bytes() {
        1 => "E=u8",
        2 => "E=u16",
        _ => "E=u32",
    };
    let function =
        Function { source: "fill.cu", defines: vec![element.to_string()], entry: "fill" };
    let n = elements(out);
    let grid = [blocks(n, u64::from(BLOCK) * 16 / out.dtype.bytes()), 1, 1];
    launch(function, grid, BLOCK, vec![result(0), Arg::U32(bits), size(n)])
}

/// A word of elements: one, or equal narrower ones.
fn word(value: f32, dtype: DType) -> u32 {
    match dtype {
        DType::F32 => value.to_bits(),
        DType::I32 => (value as i32).cast_unsigned(),
        DType::Bf16 => u32::from(bf16(value)) * 0x1_0001,
        DType::E4M3 => u32::from(Format::E4M3.encode(value)) * 0x101_0101,
        DType::E5M2 => u32::from(Format::E5M2.encode(value)) * 0x101_0101,
    }
}

/// The nearest bf16, to even between two.
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    // Cannot overflow: a number that is not NaN is at most infinity, whose lower half is zero.
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_holds_two_narrow_elements() {
        assert_eq!(word(1.0, DType::F32), 0x3f80_0000);
        assert_eq!(word(1.0, DType::Bf16), 0x3f80_3f80);
        assert_eq!(word(-2.0, DType::I32), 0xffff_fffe);
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        assert_eq!(bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(bf16(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert_eq!(bf16(f32::MAX), 0x7f80);
        assert_eq!(bf16(f32::NEG_INFINITY), 0xff80);
        assert_eq!(bf16(f32::from_bits(0x7f80_0001)), 0x7fc0);
    }
}
