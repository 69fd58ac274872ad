//! Launches for sums: `add` of any number of tensors, and `bias_add`.

use ir::{DType, Op};

use crate::cuda::elementwise::copy;
use crate::cuda::launch::{
    BLOCK, arg, blocks, elements, index, index_arg, launch, program, result, rows, size, sized,
    typed, vector_length,
};
use crate::cuda::{Arg, Function, OpCall, Operand, Pointer, Program, Unsupported, Word, Work};

/// From how many operands of how few elements on a block takes care of one element.
const MANY: (usize, u64) = (8, 1024);

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    match call.op {
        Op::Add(_) => Ok(match call.args.len() {
            1 => copy(call),
            2 => program([two(call)]),
            n => many(call, n),
        }),
        Op::BiasAdd(_) => {
            let (x, b) = (Pointer::Arg(0), Pointer::Arg(1));
            Ok(program([bias([&call.args[0], &call.args[1]], x, b, Pointer::Result(0))]))
        }
        _ => Err(Unsupported::new(call, "it is not a sum")),
    }
}

fn function(call: &OpCall<'_>, entry: &'static str, unroll: u64) -> (Function, u64) {
    let operands: Vec<&Operand> = call.args.iter().chain(call.results).collect();
    let vector = vector_length(&operands);
    let defines = vec![
        typed("X", call.results[0].dtype),
        typed("B", call.args[1].dtype),
        sized("VECTOR", vector),
        sized("UNROLL", unroll),
    ];
    (Function { source: "add.cu", defines, entry }, vector)
}

fn two(call: &OpCall<'_>) -> Work {
    let (function, vector) = function(call, "add", 2);
    let n = elements(&call.results[0]);
    let grid = [blocks(n, u64::from(BLOCK) * vector * 2), 1, 1];
    launch(function, grid, BLOCK, vec![result(0), arg(0), arg(1), size(n)])
}

/// Adds `n` elements at `from` to those at `to`, both of type `dtype` and aligned to 16 bytes.
pub(super) fn onto(dtype: DType, n: u64, to: Pointer, from: Pointer) -> Work {
    let vector = 16 / dtype.bytes();
    let types = vec![typed("X", dtype), typed("B", dtype)];
    let defines = [types, vec![sized("VECTOR", vector), sized("UNROLL", 2)]].concat();
    let function = Function { source: "add.cu", defines, entry: "add" };
    let [to, from] = [to, from].map(Arg::Pointer);
    let grid = [blocks(n, u64::from(BLOCK) * vector * 2), 1, 1];
    launch(function, grid, BLOCK, vec![to, to, from, size(n)])
}

/// The table: a pointer and a dtype for each operand, as `Term` of `add.cu`.
fn many(call: &OpCall<'_>, n_terms: usize) -> Program {
    let n = elements(&call.results[0]);
    let scalars = n_terms >= MANY.0 && n <= MANY.1;
    let (function, vector) = function(call, if scalars { "add_scalars" } else { "add_many" }, 2);
    let grid = if scalars { n as u32 } else { blocks(n, u64::from(BLOCK) * vector) };
    let table = Arg::Pointer(Pointer::Table(0));
    let args = vec![result(0), table, Arg::I32(n_terms as i32), size(n)];
    let mut res = program([launch(function, [grid, 1, 1], BLOCK, args)]);
    for (i, operand) in call.args.iter().enumerate() {
        let dtype = match operand.dtype {
            DType::F32 => 0,
            DType::Bf16 => 1,
            DType::I32 => 2,
            DType::E4M3 | DType::E5M2 => unreachable!("codes are not added"),
        };
        res.table.extend([Word::Pointer(Pointer::Arg(i as u32)), Word::Value(dtype)]);
    }
    res
}

/// Adds a vector like `b`, at `to_add`, to each row of a tensor like `x`, at `from`.
pub(super) fn bias([x, b]: [&Operand; 2], from: Pointer, to_add: Pointer, to: Pointer) -> Work {
    let (_, columns) = rows(x);
    let whole = vector_length(&[x]);
    let vector = if columns.is_multiple_of(whole) { whole } else { 1 };
    let n = elements(x);
    let defines = vec![typed("X", x.dtype), typed("B", b.dtype), sized("VECTOR", vector), index(n)];
    let function = Function { source: "bias_add.cu", defines, entry: "bias_add" };
    let n_vectors = n / vector;
    let args = vec![
        Arg::Pointer(to),
        Arg::Pointer(from),
        Arg::Pointer(to_add),
        index_arg(n, columns),
        index_arg(n, n_vectors),
    ];
    launch(function, [blocks(n_vectors, u64::from(BLOCK)), 1, 1], BLOCK, args)
}
