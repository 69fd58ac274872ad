//! How ranks meet.
//!
//! `local` is the one for ranks that are threads of this process. What a collective means is decided
//! in [`bind`](crate::bind), by global indices; a transport only has to carry data.

pub mod control;
pub mod local;
pub mod nccl;
