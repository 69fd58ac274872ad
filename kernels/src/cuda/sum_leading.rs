//! Launches for sums of columns: `sum_leading`, and what norms' gradients have in parts.

use ir::{DType, Op};

use crate::cuda::fill::zeros;
use crate::cuda::launch::{N_SMS, launch, rows, sized, typed};
use crate::cuda::{Arg, Function, OpCall, Pointer, Program, Unsupported, Work};

/// Warps of a block where rows are many, and where they are few.
const WARPS: [u64; 2] = [8, 32];
/// The fewest rows of a part: below, adding up parts costs more than they save.
const PART: u64 = 256;

pub(super) fn lower(call: &OpCall<'_>) -> Result<Program, Unsupported> {
    let Op::SumLeading(_) = call.op else {
        return Err(Unsupported::new(call, "it does not sum columns"));
    };
    let (x, out) = (&call.args[0], &call.results[0]);
    let (n_rows, columns) = rows(x);
    if n_rows == 0 {
        return Ok(crate::cuda::launch::program([zeros(0, out)]));
    }
    let from = Columns { at: Pointer::Arg(0), dtype: x.dtype, rows: n_rows, columns };
    let mut res = Program::default();
    from.sum(Pointer::Result(0), out.dtype, &mut res);
    Ok(res)
}

/// A matrix whose columns are to be summed; not empty.
pub(super) struct Columns {
    /// Where.
    pub at: Pointer,
    /// Element type.
    pub dtype: DType,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub columns: u64,
}

impl Columns {
    /// Adds the work that writes the sums to `to`; parts of sums go behind the workspace so far.
    pub(super) fn sum(&self, to: Pointer, dtype: DType, program: &mut Program) {
        let n_parts = self.n_parts();
        if n_parts == 1 {
            return program.work.push(self.launch(1, to, dtype));
        }
        let parts = Pointer::Workspace(program.workspace);
        program.workspace += (n_parts * self.columns * 4).next_multiple_of(256);
        program.work.push(self.launch(n_parts, parts, DType::F32));
        let second = Columns { at: parts, dtype: DType::F32, rows: n_parts, ..*self };
        program.work.push(second.launch(1, to, dtype));
    }

    /// Bytes of its memory.
    pub(super) fn bytes(&self) -> u64 {
        (self.rows * self.columns * self.dtype.bytes()).next_multiple_of(256)
    }

    /// Columns of a thread: a vector where all lanes of a warp still have work.
    fn vector(&self) -> u64 {
        let whole = 16 / self.dtype.bytes();
        let fits = self.columns.is_multiple_of(whole) && self.columns >= 32 * whole;
        // Of few rows, narrow columns make more blocks.
        if fits && self.rows > 2 * PART { whole } else { 1 }
    }

    fn n_tiles(&self) -> u64 {
        self.columns.div_ceil(32 * self.vector())
    }

    /// Into how many parts rows are cut, so that all multiprocessors have work.
    fn n_parts(&self) -> u64 {
        (4 * N_SMS / self.n_tiles()).clamp(1, (self.rows / PART).max(1))
    }

    fn launch(&self, n_parts: u64, to: Pointer, dtype: DType) -> Work {
        let rows_each = self.rows.div_ceil(n_parts);
        let vector = self.vector();
        // The shared memory of 32 warps is enough for one column a thread only.
        let warps = WARPS[usize::from(vector == 1 && n_parts == 1)];
        let defines = vec![
            typed("X", self.dtype),
            typed("Y", dtype),
            sized("VECTOR", vector),
            sized("WARPS", warps),
        ];
        let function = Function { source: "sum_leading.cu", defines, entry: "sum_rows" };
        let grid = [self.n_tiles() as u32, n_parts as u32, 1];
        let sizes = [self.rows, self.columns, rows_each].map(|it| Arg::I64(it as i64));
        let mut args = vec![Arg::Pointer(to), Arg::Pointer(self.at)];
        args.extend(sizes);
        launch(function, grid, 32 * warps as u32, args)
    }
}
