//! Checkpoints on disk, in the format of `torch.distributed.checkpoint` (DCP).
//!
//! A checkpoint is a folder. `.metadata` says which tensors there are, in which boxes each was cut, and
//! where the bytes of each box are:
//!
//! ```text
//! .metadata       model.w: f32[6, 2] = [0,3) x [0,2) at __0_0.distcp:0  +1577
//!                                    + [3,6) x [0,2) at __1_0.distcp:0  +1577
//! __0_0.distcp    items, one behind the other; each is a zip archive, as `torch.save` makes it:
//!                   archive/data.pkl   dtype, sizes, strides
//!                   archive/data/0     the elements
//! ```
//!
//! So nothing here depends on a mesh, a plan or a machine. Bottom up: [`dtype`], [`pickle`], [`archive`]
//! (an item), [`metadata`] (the index), [`sums`] (checksums beside the items); then [`Checkpoint`], which
//! reads any layout that PyTorch writes, [`verify`] and [`diff`]; [`hf`] and [`full`], which convert, by a
//! [`mapping`]. Nothing in a file is trusted: no input makes this crate panic, run code, or allocate more
//! than the size of the file, of what the caller asks for, or of the box of an item that is compressed, explains.

pub mod archive;
mod copy;
pub mod cover;
mod dcp;
pub mod diff;
pub mod dtype;
pub mod error;
pub mod full;
pub mod hf;
mod map;
pub mod mapping;
mod memory;
pub mod metadata;
mod open;
pub mod pickle;
mod recover;
pub mod rename;
mod safetensors;
pub mod save;
pub mod sums;
pub mod verify;

pub use dtype::StoredType;
pub use error::CheckpointError;
pub use map::{Mapped, folder_of};
pub use memory::memory;
pub use metadata::{Encoding, Item, Metadata, PathPart, StoredChunk, StoredObject, StoredTensor};
pub use open::{Checkpoint, is_count, overlap};
pub use safetensors::repeated_name;
