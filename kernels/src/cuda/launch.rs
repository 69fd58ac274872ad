//! Parts that programs are made of: sizes, grids, macros, launches.

use ir::DType;
use smallvec::SmallVec;

use crate::cuda::{Arg, Function, Launch, OpCall, Operand, Pointer, Program, Unsupported, Work};

/// Multiprocessors of an H200; on another GPU grids are merely a little uneven.
pub(super) const N_SMS: u64 = 132;
/// Threads of a block, where nothing speaks for another number.
pub(super) const BLOCK: u32 = 256;
/// The most blocks of a grid whose blocks take what is left in turns.
const MAX_BLOCKS: u64 = 64 * N_SMS;

/// Number of elements.
pub(super) fn elements(operand: &Operand) -> u64 {
    operand.shape.iter().map(|&it| it as u64).product()
}

/// Bytes of a tensor.
pub(super) fn bytes(operand: &Operand) -> u64 {
    elements(operand) * operand.dtype.bytes()
}

/// Size of the last dimension, and the number of rows of that size; of a non-empty tensor.
pub(super) fn rows(operand: &Operand) -> (u64, u64) {
    let n = operand.shape.last().map_or(1, |&it| it as u64);
    (elements(operand) / n.max(1), n)
}

/// `vector_length` of `common.cuh`: elements of a vector of 16 bytes of the widest type.
pub(super) fn vector_length(operands: &[&Operand]) -> u64 {
    16 / operands.iter().map(|it| it.dtype.bytes()).max().unwrap_or(4)
}

/// Blocks for `n` pieces of work of which a block does `each` at a time.
pub(super) fn blocks(n: u64, each: u64) -> u32 {
    n.div_ceil(each).clamp(1, MAX_BLOCKS) as u32
}

/// The macro `name` as the name of an element type in `common.cuh`.
pub(super) fn typed(name: &str, dtype: DType) -> String {
    format!("{name}={}", dtype.name())
}

/// The macro `name` as a number.
pub(super) fn sized(name: &str, value: u64) -> String {
    format!("{name}={value}")
}

/// Pointer to operand `index`.
pub(super) fn arg(index: usize) -> Arg {
    Arg::Pointer(Pointer::Arg(index as u32))
}

/// Pointer to result `index`.
pub(super) fn result(index: usize) -> Arg {
    Arg::Pointer(Pointer::Result(index as u32))
}

/// A size as an argument.
pub(super) fn size(n: u64) -> Arg {
    Arg::I64(n as i64)
}

/// A launch without dynamic shared memory.
pub(super) fn launch(function: Function, grid: [u32; 3], block: u32, args: Vec<Arg>) -> Work {
    Work::Launch(Launch { function, grid, block, shared: 0, args })
}

/// A program without scratch and table.
pub(super) fn program(work: impl IntoIterator<Item = Work>) -> Program {
    Program { work: SmallVec::from_iter(work), ..Program::default() }
}

/// The macro that says which type counts up to `n`, with room for a grid's last step.
pub(super) fn index(n: u64) -> String {
    (if fits_u32(n) { "INDEX=u32" } else { "INDEX=u64" }).to_string()
}

/// An argument of the type that [`index`] chose for `n`.
pub(super) fn index_arg(n: u64, value: u64) -> Arg {
    if fits_u32(n) { Arg::U32(value as u32) } else { Arg::I64(value as i64) }
}

fn fits_u32(n: u64) -> bool {
    n < 1 << 31
}

/// A pointer that a kernel does not read.
pub(super) fn null() -> Arg {
    Arg::I64(0)
}

/// A grid of exactly `n` blocks, of which there is at least one.
pub(super) fn grid(call: &OpCall<'_>, n: u64) -> Result<[u32; 3], Unsupported> {
    match i32::try_from(n) {
        Ok(n) => Ok([n as u32, 1, 1]),
        Err(_) => Err(Unsupported::new(call, format!("{n} blocks are more than a grid has"))),
    }
}

/// Checks the element type of an operand.
pub(super) fn need(call: &OpCall<'_>, index: usize, dtype: DType) -> Result<(), Unsupported> {
    let found = call.args[index].dtype;
    match found == dtype {
        true => Ok(()),
        false => {
            let why = format!("operand {index} is {found}, and its kernel takes {dtype}");
            Err(Unsupported::new(call, why))
        }
    }
}

/// A `double`: its bits, since there is no argument type for it.
pub(super) fn double(x: f64) -> Arg {
    Arg::I64(x.to_bits() as i64)
}
