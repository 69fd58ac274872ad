//! `--tensorboard`: scalars of a run in the event files of TensorBoard.
//!
//! A file is a list of TFRecords, and each record a protocol buffer of four fields, so both are written by
//! hand here. Sources: `tensorflow/core/lib/io/record_writer.h` (the frame), `tensorflow/core/util/event.proto`
//! and `tensorflow/core/framework/summary.proto` (the numbers of fields):
//!
//! ```text
//! record   length u64, masked crc of the length u32, data, masked crc of the data u32; little-endian
//! Event    1 wall_time double, 2 step varint, one of: 3 file_version text, 5 Summary, 7 SessionLog
//! Summary  1 repeated Value;  Value  1 tag text, 2 simple_value float
//! ```

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::RunError;
use crate::output::AppendFile;

/// A file of events. TensorBoard shows all files of a folder as one run, in the order of their names.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    out: AppendFile,
    /// The first records, until they are written.
    head: Vec<u8>,
}

impl EventFile {
    /// A new file in a folder, which is made if it is not there. `after`: the steps after this one are done
    /// again, or go on, and what an earlier file has of them is not shown.
    pub fn create(folder: &Path, after: Option<u64>) -> Result<EventFile, RunError> {
        std::fs::create_dir_all(folder).map_err(|it| RunError::write(folder, &it))?;
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if host.trim().is_empty() { "localhost" } else { host.trim() };
        let (seconds, pid) = (wall_time() as u64, std::process::id());
        let mut files = (0..)
            .map(|n| folder.join(format!("events.out.tfevents.{seconds:010}.{host}.{pid}.{n}")));
        let (path, out) = loop {
            let path = files.next().expect("there is always another number");
            match File::options().create_new(true).append(true).open(&path) {
                Ok(out) => break (path, AppendFile::new(out)),
                Err(it) if it.kind() == ErrorKind::AlreadyExists => (),
                Err(it) => return Err(RunError::write(&path, &it)),
            }
        };
        let mut head = record(0, |event| bytes(event, 3, b"brain.Event:2"));
        if let Some(step) = after {
            // SessionLog with status START: events of this step and later ones that came before are dropped.
            head.extend(record(step + 1, |event| bytes(event, 7, &[1 << 3, 1])));
        }
        Ok(EventFile { path, out, head })
    }

    /// Adds scalars of a step, and hands them to the system, so that a run that is killed leaves them.
    pub fn write(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<(), RunError> {
        let mut summary = Vec::new();
        for (tag, value) in scalars {
            let mut entry = Vec::new();
            bytes(&mut entry, 1, tag.as_bytes());
            float(&mut entry, 2, *value as f32);
            bytes(&mut summary, 1, &entry);
        }
        let record = record(step, |event| bytes(event, 5, &summary));
        let records = [&self.head[..], &record].concat();
        self.out.push(&records).map_err(|it| RunError::write(&self.path, &it))?;
        self.head.clear();
        Ok(())
    }
}

/// An event in its frame.
fn record(step: u64, what: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut event = Vec::new();
    double(&mut event, 1, wall_time());
    varint(&mut event, 2 << 3);
    varint(&mut event, step);
    what(&mut event);
    let length = (event.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(&event);
    record.extend(masked_crc(&event).to_le_bytes());
    record
}

/// Seconds since 1970.
fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |it| it.as_secs_f64())
}

/// Masked, because a crc of data that has crcs in it is weak.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A field of the wire type 2: its length, then its bytes.
fn bytes(out: &mut Vec<u8>, field: u64, data: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, data.len() as u64);
    out.extend(data);
}

/// Wire type 1.
fn double(out: &mut Vec<u8>, field: u64, value: f64) {
    varint(out, field << 3 | 1);
    out.extend(value.to_le_bytes());
}

/// Wire type 5.
fn float(out: &mut Vec<u8>, field: u64, value: f32) {
    varint(out, field << 3 | 5);
    out.extend(value.to_le_bytes());
}
