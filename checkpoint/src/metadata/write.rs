//! Index -> pickle. Whatever repeats (classes, names of attributes, keys, files) is written once.

use std::io;

use crate::pickle::write::{BATCH, Writer};

use super::{Encoding, Item, Metadata, PathPart, StoredTensor};

const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";
/// The version of the format.
const VERSION: &str = "1.0.0";
/// What is collected before it is written.
const BUFFER: usize = 1 << 16;

impl Metadata {
    /// Writes `.metadata`.
    ///
    /// # Panics
    /// For items in safetensors files, which have no index of this kind.
    pub fn write(&self, out: impl io::Write) -> io::Result<()> {
        let mut to = Out { out, pickle: Writer::default(), left: 0 };
        to.instance(METADATA, "Metadata");
        to.pickle.raw(b"}(");
        to.pickle.text("state_dict_metadata");
        self.write_values(&mut to)?;
        to.pickle.text("planner_data");
        self.write_paths(&mut to)?;
        to.pickle.text("storage_data");
        self.write_places(&mut to)?;
        to.pickle.text("storage_meta");
        to.instance(METADATA, "StorageMeta");
        to.pickle.raw(b"}(");
        to.pickle.text("checkpoint_id");
        to.pickle.none();
        to.pickle.text("save_id");
        match &self.save_id {
            Some(it) => to.pickle.text(it),
            None => to.pickle.none(),
        }
        to.pickle.text("load_id");
        to.pickle.none();
        to.pickle.text("modules");
        to.pickle.raw(b"]ub");
        to.pickle.text("version");
        to.pickle.text(VERSION);
        to.pickle.raw(b"ub");
        to.pickle.stop();
        to.flush(0)
    }

    fn write_values(&self, to: &mut Out<impl io::Write>) -> io::Result<()> {
        to.open(b'}');
        for (key, tensor) in &self.tensors {
            to.entry(b'u')?;
            to.pickle.shared_text(key);
            to.instance(METADATA, "TensorStorageMetadata");
            to.pickle.raw(b"}(");
            to.pickle.shared_text("properties");
            to.properties(tensor);
            to.pickle.shared_text("size");
            to.size(&tensor.shape);
            to.pickle.shared_text("chunks");
            to.chunks(tensor)?;
            to.pickle.raw(b"ub");
        }
        for key in self.objects.keys() {
            to.entry(b'u')?;
            to.pickle.shared_text(key);
            to.instance(METADATA, "BytesStorageMetadata");
        }
        to.close(b'u');
        Ok(())
    }

    fn write_paths(&self, to: &mut Out<impl io::Write>) -> io::Result<()> {
        let tensors = self.tensors.iter().map(|it| (it.0, &it.1.path));
        let objects = self.objects.iter().map(|it| (it.0, &it.1.path));
        to.open(b'}');
        for (key, path) in tensors.chain(objects).filter(|it| !it.1.is_empty()) {
            to.entry(b'u')?;
            to.pickle.shared_text(key);
            to.pickle.raw(b"(");
            for part in path {
                match part {
                    PathPart::Key(it) => to.pickle.shared_text(it),
                    PathPart::Index(it) => to.pickle.int((*it).into()),
                }
            }
            to.pickle.raw(b"t");
        }
        to.close(b'u');
        Ok(())
    }

    fn write_places(&self, to: &mut Out<impl io::Write>) -> io::Result<()> {
        to.open(b'}');
        for (key, tensor) in &self.tensors {
            for (index, it) in tensor.chunks.iter().enumerate() {
                to.entry(b'u')?;
                to.instance(METADATA, "MetadataIndex");
                to.pickle.raw(b"}(");
                to.pickle.shared_text("fqn");
                to.pickle.shared_text(key);
                to.pickle.shared_text("index");
                to.pickle.int(index as i128);
                to.pickle.shared_text("offset");
                to.size(&it.chunk.offsets);
                to.pickle.raw(b"ub");
                to.place(&it.item, &self.files);
            }
        }
        for (key, object) in &self.objects {
            to.entry(b'u')?;
            to.instance(METADATA, "MetadataIndex");
            to.pickle.raw(b"}(");
            to.pickle.shared_text("fqn");
            to.pickle.shared_text(key);
            to.pickle.shared_text("index");
            to.pickle.none();
            to.pickle.raw(b"ub");
            to.place(&object.item, &self.files);
        }
        to.close(b'u');
        Ok(())
    }
}

/// A pickle on its way to a file.
struct Out<W> {
    out: W,
    pickle: Writer,
    /// Entries until the batch of the innermost dict or list is full; 0 before its first.
    left: usize,
}

impl<W: io::Write> Out<W> {
    /// Empties the buffer if it holds more than `keep` bytes.
    fn flush(&mut self, keep: usize) -> io::Result<()> {
        if self.pickle.out.len() > keep {
            self.out.write_all(&self.pickle.out)?;
            self.pickle.out.clear();
        }
        Ok(())
    }

    /// Starts a dict or list.
    fn open(&mut self, empty: u8) {
        self.pickle.raw(&[empty, b'(']);
        self.left = BATCH;
    }

    /// Before an entry: `add` ends a full batch.
    fn entry(&mut self, add: u8) -> io::Result<()> {
        if self.left == 0 {
            self.pickle.raw(&[add, b'(']);
            self.left = BATCH;
        }
        self.left -= 1;
        self.flush(BUFFER)
    }

    fn close(&mut self, add: u8) {
        self.pickle.raw(&[add]);
    }

    /// An instance without state.
    fn instance(&mut self, module: &'static str, class: &'static str) {
        self.pickle.global(module, class);
        self.pickle.raw(b")\x81");
    }

    fn size(&mut self, sizes: &[u64]) {
        self.pickle.global("torch", "Size");
        self.pickle.ints(sizes);
        self.pickle.raw(b"\x85R");
    }

    /// Five elements, as PyTorch up to 2.14 wants them and later ones accept.
    fn properties(&mut self, tensor: &StoredTensor) {
        self.instance(METADATA, "TensorProperties");
        self.pickle.raw(b"(");
        self.pickle.global("torch", tensor.dtype.torch());
        self.pickle.global("torch.serialization", "_get_layout");
        self.pickle.shared_text("torch.strided");
        self.pickle.raw(b"\x85R");
        self.pickle.bool(false);
        self.pickle.global(METADATA, "_MEM_FORMAT_ENCODING");
        self.pickle.int(0);
        self.pickle.raw(b"\x85R");
        self.pickle.bool(false);
        self.pickle.raw(b"tb");
    }

    fn chunks(&mut self, tensor: &StoredTensor) -> io::Result<()> {
        let outer = self.left;
        self.open(b']');
        for it in &tensor.chunks {
            self.entry(b'e')?;
            self.instance(METADATA, "ChunkStorageMetadata");
            self.pickle.raw(b"}(");
            self.pickle.shared_text("offsets");
            self.size(&it.chunk.offsets);
            self.pickle.shared_text("sizes");
            self.size(&it.chunk.sizes);
            self.pickle.raw(b"ub");
        }
        self.close(b'e');
        self.left = outer;
        Ok(())
    }

    fn place(&mut self, item: &Item, files: &[String]) {
        self.instance(FILESYSTEM, "_StorageInfo");
        self.pickle.raw(b"}(");
        self.pickle.shared_text("relative_path");
        self.pickle.shared_text(&files[item.file as usize]);
        self.pickle.shared_text("offset");
        self.pickle.int(item.offset.into());
        self.pickle.shared_text("length");
        self.pickle.int(item.len.into());
        match item.encoding {
            Encoding::Plain => {}
            Encoding::Zstd => {
                self.pickle.shared_text("transform_descriptors");
                self.pickle.raw(b"](");
                self.pickle.text("stream.zstd/1");
                self.pickle.raw(b"e");
            }
            Encoding::Raw => panic!("an index cannot name what is in safetensors files"),
        }
        self.pickle.raw(b"ub");
    }
}
