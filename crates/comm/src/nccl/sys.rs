//! NCCL's library, loaded at run time: a machine without it gets an error, not a program that does
//! not start.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use cudarc::nccl::sys::{
    cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId,
};

use crate::SetupError;

/// What the library is called.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The first version with communicators that do not block.
const OLDEST: c_int = 21400;

/// A result as it comes out of C: an enum of Rust must not hold what a newer version adds.
pub(super) type Code = c_int;

/// `ncclSuccess`.
pub(super) const SUCCESS: Code = 0;
/// `ncclInProgress`.
pub(super) const IN_PROGRESS: Code = 7;

macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($arg:ty),*) -> $result:ty;)*) => {
        /// The functions that are used, under their names without `nccl`.
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Functions {
            fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the types are those of nccl.h, which keeps them within a major
                    // version; the library is never unloaded.
                    $($name: *unsafe { library.get($symbol) }?,)*
                })
            }
        }
    };
}

functions! {
    get_version = c"ncclGetVersion": fn(*mut c_int) -> Code;
    get_unique_id = c"ncclGetUniqueId": fn(*mut ncclUniqueId) -> Code;
    comm_init_rank_config = c"ncclCommInitRankConfig":
        fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> Code;
    comm_get_async_error = c"ncclCommGetAsyncError": fn(ncclComm_t, *mut Code) -> Code;
    comm_finalize = c"ncclCommFinalize": fn(ncclComm_t) -> Code;
    comm_destroy = c"ncclCommDestroy": fn(ncclComm_t) -> Code;
    comm_abort = c"ncclCommAbort": fn(ncclComm_t) -> Code;
    get_error_string = c"ncclGetErrorString": fn(Code) -> *const c_char;
    get_last_error = c"ncclGetLastError": fn(ncclComm_t) -> *const c_char;
    group_start = c"ncclGroupStart": fn() -> Code;
    group_end = c"ncclGroupEnd": fn() -> Code;
    all_reduce = c"ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) -> Code;
    reduce = c"ncclReduce":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t, cudaStream_t) -> Code;
    reduce_scatter = c"ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) -> Code;
    all_gather = c"ncclAllGather":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t) -> Code;
    broadcast = c"ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> Code;
    send = c"ncclSend":
        fn(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> Code;
    recv = c"ncclRecv":
        fn(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> Code;
}

/// The library, in a version that will do.
pub(super) struct Library {
    pub(super) functions: Functions,
    pub(super) version: c_int,
    _loaded: libloading::Library,
}

impl Library {
    /// The library of this process, loaded once.
    pub(super) fn get() -> Result<&'static Self, SetupError> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        let library = LIBRARY.get_or_init(Self::load);
        library.as_ref().map_err(|reason| SetupError::Library {
            library: "NCCL",
            tried: NAMES.map(str::to_owned).to_vec(),
            reason: reason.clone(),
        })
    }

    fn load() -> Result<Self, String> {
        let mut reasons = Vec::new();
        let found = NAMES.iter().find_map(|name| {
            // SAFETY: NCCL's initializers have no requirements; no other library has its name.
            let library = unsafe { libloading::Library::new(*name) };
            library.map_err(|e| reasons.push(e.to_string())).ok()
        });
        let loaded = found.ok_or_else(|| reasons.join("; "))?;
        let functions = Functions::find(&loaded).map_err(|e| e.to_string())?;
        let mut version = 0;
        // SAFETY: it writes one number.
        let code = unsafe { (functions.get_version)(&mut version) };
        if code != SUCCESS || version < OLDEST {
            return Err(format!(
                "version {}, and communicators that do not block need {}",
                Version(version),
                Version(OLDEST)
            ));
        }
        Ok(Self {
            functions,
            version,
            _loaded: loaded,
        })
    }

    /// What a result means: whether the call is done, or still in progress.
    pub(super) fn check(
        &self,
        call: &'static str,
        comm: ncclComm_t,
        code: Code,
    ) -> Result<bool, Failure> {
        match code {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            code => Err(Failure {
                call,
                version: self.version,
                // SAFETY: any code has a text, which is static.
                text: unsafe { text((self.functions.get_error_string)(code)) },
                // SAFETY: it takes any communicator or none; the text lives until the next error of
                // this thread and is copied.
                detail: unsafe { text((self.functions.get_last_error)(comm)) },
            }),
        }
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {}", Version(self.version))
    }
}

/// A call that failed, in NCCL's words.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    call: &'static str,
    version: c_int,
    text: String,
    detail: String,
}

/// `ncclCommInitRank of NCCL 2.30.7: invalid usage (run with NCCL_DEBUG=WARN for details): Duplicate GPU …`
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            call,
            version,
            text,
            detail,
        } = self;
        write!(f, "{call} of NCCL {}: {text}", Version(*version))?;
        match detail.trim() {
            "" => Ok(()),
            detail => write!(f, ": {detail}"),
        }
    }
}

/// 23007 is 2.30.7.
struct Version(c_int);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(code) = self;
        write!(f, "{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
    }
}

/// # Safety
/// The pointer is null or points to a text that ends in 0.
unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(from) }
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_or_what_was_tried_is_named() {
        match Library::get() {
            Ok(library) => {
                let null = std::ptr::null_mut();
                assert!(library.check("f", null, SUCCESS).is_ok_and(|done| done));
                assert!(
                    library
                        .check("f", null, IN_PROGRESS)
                        .is_ok_and(|done| !done)
                );
                let failure = library.check("f", null, 5).unwrap_err().to_string();
                let begin = format!("f of NCCL {}: invalid usage", Version(library.version));
                assert!(failure.starts_with(&begin), "{failure}");
            }
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.starts_with("no usable NCCL, tried libnccl.so.2, libnccl.so: "),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn versions_read_as_they_are_written() {
        assert_eq!(Version(23007).to_string(), "2.30.7");
        assert_eq!(Version(OLDEST).to_string(), "2.14.0");
    }
}
