//! The search for the instruction that makes the first number that is not finite.
//!
//! A step that was skipped left weights and states as they were, so that it can be repeated. The repeat runs call by
//! call, and looks at what each instruction makes until it finds such a number.

use ir::DType;
use ir::placement::ReduceOp;
use ir::plan::{Buffer, PlanSection};

use crate::bind::{At, coord_name, describe};
use crate::error::RunError;
use crate::exec;
use crate::session::Rank;

/// A search, while it goes on.
#[derive(Debug, Default)]
pub(crate) struct Search {
    /// The first instruction found, in words.
    pub(crate) found: Option<String>,
    /// Memory for the content of a buffer.
    bytes: Vec<u8>,
}

impl Rank {
    /// Runs a section, and stops after each instruction to look at its results.
    pub(crate) fn search(
        &mut self,
        section: PlanSection,
        search: &mut Search,
    ) -> Result<(), RunError> {
        let bound = self.bound.clone();
        self.backend.begin(section)?;
        for (index, instruction) in bound.sections[section as usize].iter().enumerate() {
            exec::issue(std::slice::from_ref(instruction), &mut *self.backend)?;
            self.backend.finish()?;
            // What is made of weights is finite if they are, and they are looked at as operands.
            if search.found.is_none() && section != PlanSection::Prepare {
                search.found = self.look(At { section, index }, &mut search.bytes)?;
            }
        }
        Ok(())
    }

    /// Says what an instruction made that is not finite.
    fn look(&self, at: At, bytes: &mut Vec<u8>) -> Result<Option<String>, RunError> {
        let instruction = &self.plan.section(at.section)[at.index];
        let writes = instruction.writes();
        let made = self.first_nonfinite(writes.iter().copied(), bytes)?;
        let Some(made) = made else { return Ok(None) };
        let reads = instruction.reads().into_iter().filter(|it| !writes.contains(it));
        let given = self.first_nonfinite(reads, bytes)?;
        let name = |it: Buffer| self.plan.buffers[it].name.as_str();
        let (rank, coord) = (self.bound.rank, coord_name(&self.plan.mesh, &self.bound.coord));
        let place = describe(&self.plan, at);
        Ok(Some(match given {
            None => format!(
                "rank {rank} ({coord}): {place} is the first result that is not finite (`{}`); its operands are finite",
                name(made)
            ),
            Some(it) => format!(
                "rank {rank} ({coord}): `{}` is not finite before the step; {place} reads it first",
                name(it)
            ),
        }))
    }

    /// Returns the first buffer that holds a number that is not finite. A maximum over ranks starts at minus infinity.
    fn first_nonfinite(
        &self,
        buffers: impl IntoIterator<Item = Buffer>,
        bytes: &mut Vec<u8>,
    ) -> Result<Option<Buffer>, RunError> {
        for buffer in buffers {
            let bound = &self.bound.buffers[buffer];
            // Integers are finite, and need not be read.
            if bound.dtype == DType::I32 {
                continue;
            }
            bytes.resize(bound.bytes(), 0);
            self.backend.read(buffer, bytes)?;
            let partial = self.plan.buffers[buffer].sharding.partial;
            let is_maximum = partial.is_some_and(|it| it.0 == ReduceOp::Max);
            if has_nonfinite(bound.dtype, bytes, is_maximum) {
                return Ok(Some(buffer));
            }
        }
        Ok(None)
    }
}

/// Returns true if numbers of a type, given as their bytes, are not all finite. Minus infinity counts as finite if
/// `below` says so.
fn has_nonfinite(dtype: DType, bytes: &[u8], below: bool) -> bool {
    match dtype {
        DType::I32 => false,
        DType::F32 => {
            let all: &[u32] = bytemuck::cast_slice(bytes);
            let bad = |it: u32| it & 0x7f80_0000 == 0x7f80_0000 && !(below && it == 0xff80_0000);
            all.iter().any(|&it| bad(it))
        }
        DType::Bf16 => {
            let all: &[u16] = bytemuck::cast_slice(bytes);
            let bad = |it: u16| it & 0x7f80 == 0x7f80 && !(below && it == 0xff80);
            all.iter().any(|&it| bad(it))
        }
        // It has NaN and no infinity.
        DType::E4M3 => bytes.iter().any(|it| it & 0x7f == 0x7f),
        DType::E5M2 => bytes.iter().any(|it| it & 0x7c == 0x7c),
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn numbers_of_each_type_are_looked_at() {
        let f32s = |it: f32| it.to_le_bytes().to_vec();
        let bf16s = |it: f32| bf16::from_f32(it).to_le_bytes().to_vec();
        for (value, bad) in
            [(1.0, false), (f32::MAX, false), (f32::INFINITY, true), (f32::NAN, true)]
        {
            assert_eq!(has_nonfinite(DType::F32, &f32s(value), false), bad, "{value}");
            let finite = value == f32::MAX;
            assert!(finite || has_nonfinite(DType::Bf16, &bf16s(value), false) == bad, "{value}");
        }
        assert!(has_nonfinite(DType::F32, &f32s(f32::NEG_INFINITY), false));
        assert!(!has_nonfinite(DType::F32, &f32s(f32::NEG_INFINITY), true));
        assert!(!has_nonfinite(DType::Bf16, &bf16s(f32::NEG_INFINITY), true));
        // 448 and NaN in e4m3, 57344 and infinity in e5m2.
        let of = |dtype, it: u8| has_nonfinite(dtype, &[it], false);
        assert!(!of(DType::E4M3, 0x7e) && of(DType::E4M3, 0xff));
        assert!(!of(DType::E5M2, 0x7b) && of(DType::E5M2, 0xfc));
    }
}
