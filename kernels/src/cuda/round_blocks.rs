//! Launches for `round_mx`, `round_nvfp4` and `hadamard`.
//!
//! ```text
//! table   4 words for each dimension of `x`, if it is in pieces
//!         2 words for each dimension that rows with neighbouring global indices are counted by, if rounding is
//!         stochastic
//! ```

use ir::ops::Along;
use ir::quant::nvfp4;
use ir::{DType, Op};

use crate::cuda::dropout::{self, Rows};
use crate::cuda::launch::{
    BLOCK, arg, elements, grid, launch, need, null, program, result, rows, size, sized, typed,
    vector_length,
};
use crate::cuda::pieces::{dims, words};
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Word};

/// How a tensor is rounded.
struct Rounding {
    /// `CODE` of `round_blocks.cu`.
    code: &'static str,
    along: Along,
    /// Numbers along a side of a block.
    side: u64,
    /// Element type of the amax.
    amax: DType,
    /// The amax of the whole and the seed.
    operands: [Arg; 2],
    /// Key of the random bits.
    key: u64,
    pieces: Vec<Word>,
    /// Rows of random bits.
    rows: Option<Rows>,
}

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let it = rounding(call)?;
    let x = &call.args[0];
    let (n, (_, n_columns)) = (elements(x), rows(x));
    let random = it.rows.as_ref();
    let defines = vec![
        typed("X", x.dtype),
        typed("A", it.amax),
        format!("CODE={}", it.code),
        sized("SQUARE", (it.along == Along::Square).into()),
        sized("STOCHASTIC", random.is_some().into()),
    ];
    let (entry, each) = match it.along {
        Along::Rows => ("round_rows", vector_length(&[x])),
        Along::Columns | Along::Square => ("round_columns", it.side),
    };
    let function = Function { source: "round_blocks.cu", defines, entry };
    let [amax, seed] = it.operands;
    let counted = random.map_or(&[][..], |it| &it.dims);
    let dims = counted.iter().flatten().map(|&it| Word::Value(it));
    let n_pieces = it.pieces.len();
    let table: Vec<Word> = it.pieces.into_iter().chain(dims).collect();
    let part = |there: bool, at: usize| match there {
        true => Arg::Pointer(Pointer::Table(at as u32)),
        false => null(),
    };
    let args = vec![
        arg(0),
        result(0),
        size(n),
        size(n_columns),
        amax,
        part(n_pieces > 0, 0),
        Arg::I32((n_pieces / 4) as i32),
        seed,
        size(it.key),
        part(!counted.is_empty(), n_pieces),
        Arg::I32(counted.len() as i32),
        size(random.map_or(n, |it| it.n)),
        size(random.map_or(0, |it| it.first)),
        size(call.bounds.last().map_or(n_columns, |it| it.size)),
    ];
    let blocks = (n / each).div_ceil(BLOCK.into());
    Ok(Program { table, ..program([launch(function, grid(call, blocks)?, BLOCK, args)]) })
}

fn rounding(call: &OpCall<'_>) -> Result<Rounding, Unsupported> {
    match call.op {
        Op::RoundMx(it) => Ok(Rounding {
            code: it.to.name(),
            along: it.along,
            side: 32,
            amax: DType::F32,
            operands: [null(), null()],
            key: 0,
            pieces: Vec::new(),
            rows: None,
        }),
        Op::RoundNvFp4(it) => {
            if it.stochastic.is_some() {
                need(call, 2, DType::I32)?;
            }
            let [x, amax, ..] = call.args else { return Err(Unsupported::new(call, "no amax")) };
            let pieces = match it.pieces.as_slice() {
                [] => Vec::new(),
                some => words(&dims(&x.shape, &amax.shape, some)).collect(),
            };
            Ok(Rounding {
                code: "e2m1",
                along: it.along,
                side: nvfp4::BLOCK as u64,
                amax: amax.dtype,
                operands: [arg(1), it.stochastic.map_or(null(), |_| arg(2))],
                key: it.stochastic.unwrap_or(0),
                pieces,
                rows: it.stochastic.map(|_| dropout::rows(call)),
            })
        }
        _ => Err(Unsupported::new(call, "it rounds nothing")),
    }
}

/// The Hadamard transform of each 16 rows.
pub(super) fn hadamard(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let x = &call.args[0];
    let function =
        Function { source: "hadamard.cu", defines: vec![typed("X", x.dtype)], entry: "hadamard" };
    let n = elements(x);
    let blocks = (n / nvfp4::BLOCK as u64).div_ceil(BLOCK.into());
    let args = vec![arg(0), result(0), size(n), size(rows(x).1)];
    Ok(program([launch(function, grid(call, blocks)?, BLOCK, args)]))
}
