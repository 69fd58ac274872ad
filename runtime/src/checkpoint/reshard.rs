//! `reshard`: a checkpoint, written anew as the ranks of a plan would have saved it.
//!
//! No rank runs for that: each part that a rank answers for is read where it is and written to that rank's
//! file, some rows at a time. Every byte of the state is read once, by whom [`Reshard::reads`] says.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread::scope;
use std::time::Instant;

use checkpoint::CheckpointError;
use checkpoint::metadata::Metadata;
use checkpoint::save::{
    Content, FolderLock, Position, ShardFile, StepFolder, file_items, metadata, run_id,
};
use ir::DType;
use ir::placement::Chunk;
use ir::plan::Plan;

use super::load::{LoadOptions, Loaded, volume};
use crate::error::RunError;

/// Bytes that are read at once, unless one row has more.
const SLAB: u64 = 8 << 20;

/// What one rank reads of each file of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankReads {
    /// The rank of the new mesh.
    pub rank: u64,
    /// Bytes of tensors, by file.
    pub files: BTreeMap<String, u64>,
}

/// A checkpoint for a plan.
#[derive(Debug)]
pub struct Reshard {
    loaded: Loaded,
    position: Position,
    /// Keys that the plan saves and that cannot be had from the checkpoint: a run that loads the new one
    /// makes them.
    pub left_out: Vec<String>,
}

/// A checkpoint that was written.
#[derive(Debug, Clone, PartialEq)]
pub struct ReshardReport {
    /// Where it is.
    pub path: PathBuf,
    /// Bytes of all its files.
    pub bytes: u64,
    /// The most memory that it took for elements.
    pub memory: u64,
    /// How long it took.
    pub seconds: f64,
}

impl Reshard {
    /// Compares a checkpoint with a plan, as loading it would.
    pub fn open(plan: &Plan, options: &LoadOptions) -> Result<Reshard, RunError> {
        let mut loaded = Loaded::open(plan, options)?;
        let left_out = loaded.leave_out_what_is_not_there();
        let position = loaded.at(loaded.seed.unwrap_or(plan.run.seed));
        Ok(Reshard { loaded, position, left_out })
    }

    /// What the user should know, a line each.
    pub fn warnings(&self) -> &[String] {
        &self.loaded.warnings
    }

    /// Steps that were done.
    pub fn step(&self) -> u64 {
        self.position.step
    }

    /// Bytes of all tensors as they are stored, each once.
    pub fn unique_bytes(&self) -> u64 {
        let entries = self.loaded.layout.entries.iter().enumerate();
        entries.map(|(i, it)| it.ty.n_elements() * self.loaded.stored_type(i).bytes()).sum()
    }

    /// What each rank reads.
    pub fn reads(&self) -> Vec<RankReads> {
        let layout = &self.loaded.layout;
        let ranks = (0..layout.mesh.n_ranks()).map(|rank| {
            let coord = layout.mesh.coord_of(rank);
            let mut files: BTreeMap<String, u64> = BTreeMap::new();
            for (index, entry) in layout.entries.iter().enumerate() {
                for chunk in entry.chunks_written(&layout.mesh, &coord) {
                    for (file, bytes) in self.loaded.reads(index, &chunk) {
                        *files.entry(file.to_string()).or_default() += bytes;
                    }
                }
            }
            RankReads { rank, files }
        });
        ranks.collect()
    }

    /// Writes it to `folder/step-N`, and points `folder/latest` to it.
    pub fn write(&self, folder: &Path) -> Result<ReshardReport, RunError> {
        let began = Instant::now();
        let layout = &self.loaded.layout;
        let lock = FolderLock::acquire(folder, &run_id(), &mut |_| ())?;
        let target = StepFolder::new(folder, self.position.step, lock.run());
        target.create()?;
        target.remove_leftovers(&lock)?;
        let ranks: Vec<u64> = (0..layout.mesh.n_ranks()).collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = ranks.len().div_ceil(threads);
        let written: Result<Vec<(u64, u64)>, RunError> = scope(|scope| {
            let work = |ranks: &[u64]| -> Result<(u64, u64), RunError> {
                let (mut bytes, mut memory) = (0, Memory::default());
                for &rank in ranks {
                    bytes += self.write_rank(&target, rank, &mut memory)?;
                }
                Ok((bytes, (memory.out.capacity() + memory.raw.capacity()) as u64))
            };
            let threads: Vec<_> =
                ranks.chunks(share).map(|ranks| scope.spawn(move || work(ranks))).collect();
            threads.into_iter().map(|it| it.join().expect("it does not panic")).collect()
        });
        let committed = written.and_then(|written| {
            let mut index = Vec::new();
            let made =
                Metadata { save_id: Some(target.save_id()), ..metadata(layout, &self.position) }
                    .write(&mut index);
            made.map_err(|it| CheckpointError::io("write", &target.target(), &it))?;
            target.commit(&lock, &index, None, &[])?;
            Ok(written)
        });
        let written = committed.inspect_err(|_| target.abandon())?;
        Ok(ReshardReport {
            path: target.target(),
            bytes: written.iter().map(|it| it.0).sum(),
            memory: written.iter().map(|it| it.1).sum(),
            seconds: began.elapsed().as_secs_f64(),
        })
    }

    /// Writes the file of a rank; its bytes.
    fn write_rank(
        &self,
        folder: &StepFolder,
        rank: u64,
        memory: &mut Memory,
    ) -> Result<u64, RunError> {
        let layout = &self.loaded.layout;
        let items = file_items(layout, &self.position, &layout.mesh.coord_of(rank));
        let mut file = ShardFile::create(folder, rank)?;
        for item in &items {
            let (dtype, part) = match &item.content {
                Content::Shard { entry, local } => {
                    (layout.entries[*entry].ty.dtype, Some((*entry, &local.chunk)))
                }
                Content::Object(_) | Content::Scalar(_) => (DType::F32, None),
            };
            file.write(item, dtype.into(), |write| -> Result<(), RunError> {
                let Some((entry, chunk)) = part else { return Ok(()) };
                for slab in slabs(chunk, dtype.bytes()) {
                    memory.out.resize((volume(&slab) * dtype.bytes()) as usize, 0);
                    self.loaded.read(entry, &slab, &mut memory.out, &mut memory.raw)?;
                    write(&memory.out)?;
                }
                Ok(())
            })?;
        }
        file.finish()?;
        Ok(items.last().map_or(0, |it| it.at + it.len))
    }
}

/// What elements pass through.
#[derive(Default)]
struct Memory {
    out: Vec<u8>,
    /// In the type in which they are stored, where that is another.
    raw: Vec<u8>,
}

/// A box in pieces of some rows.
fn slabs(chunk: &Chunk, unit: u64) -> Vec<Chunk> {
    let Some(&rows) = chunk.sizes.first() else { return vec![chunk.clone()] };
    let row = chunk.sizes[1..].iter().product::<u64>() * unit;
    let step = (SLAB / row.max(1)).max(1);
    let piece = |first: u64| {
        let mut piece = chunk.clone();
        piece.offsets[0] += first;
        piece.sizes[0] = step.min(rows - first);
        piece
    };
    (0..rows).step_by(step as usize).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    #[test]
    fn slabs_are_some_rows_and_make_up_the_box() {
        let chunk = Chunk { offsets: smallvec![5, 7], sizes: smallvec![10, 1 << 20] };
        let rows = |it: &Chunk| (it.offsets[0], it.sizes[0]);
        let found: Vec<(u64, u64)> = slabs(&chunk, 4).iter().map(rows).collect();
        assert_eq!(found, [(5, 2), (7, 2), (9, 2), (11, 2), (13, 2)]);
        let found: Vec<(u64, u64)> = slabs(&chunk, 3).iter().map(rows).collect();
        assert_eq!(found, [(5, 2), (7, 2), (9, 2), (11, 2), (13, 2)]);
        assert_eq!(slabs(&chunk, 16).len(), 10);
        assert_eq!(slabs(&Chunk::default(), 4), [Chunk::default()]);
    }
}
