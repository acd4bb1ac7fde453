# Attaches the sources of this folder to the targets of llama.cpp, without a line in upstream's CMake files.
#
#   cmake -DCMAKE_PROJECT_llama.cpp_INCLUDE=<this file> ...
#
# CMake includes this file right after upstream's project() call; the targets do not exist yet, so the work is deferred to the
# end of the top-level directory. Every CPU variant (GGML_CPU_ALL_VARIANTS) compiles our CPU files with its own flags.

if (COMMAND sparq_attach)
    message(FATAL_ERROR "attach.cmake is included twice: CMAKE_PROJECT_llama.cpp_INCLUDE is the one way in")
endif()

set(SPARQ_OPS_DIR ${CMAKE_CURRENT_LIST_DIR})
include(${SPARQ_OPS_DIR}/compilers/compilers.cmake)

function(sparq_attach)
    set(ops ${SPARQ_OPS_DIR})

    target_sources(ggml-base PRIVATE ${ops}/ggml-sparse.c ${ops}/sparse-fatal.c)
    target_include_directories(ggml-base PUBLIC $<BUILD_INTERFACE:${ops}>)

    file(GLOB cpu_sources CONFIGURE_DEPENDS ${ops}/cpu/*.cpp)
    get_property(targets DIRECTORY ${CMAKE_SOURCE_DIR}/ggml/src PROPERTY BUILDSYSTEM_TARGETS)
    foreach (target IN LISTS targets)
        if (target MATCHES "^ggml-cpu" AND NOT target MATCHES "-feats$")
            target_sources(${target} PRIVATE ${cpu_sources})
            target_include_directories(${target} PRIVATE ${ops}/cpu)
        endif()
    endforeach()

    if (TARGET ggml-cuda)
        file(GLOB cuda_sources CONFIGURE_DEPENDS ${ops}/cuda/*.cu)
        target_sources(ggml-cuda PRIVATE ${cuda_sources})
    endif()
    foreach (target ggml-cuda ggml-hip ggml-musa) # all compile the hooked file; the header says where there are kernels
        if (TARGET ${target})
            target_include_directories(${target} PRIVATE ${ops}/cuda ${CMAKE_SOURCE_DIR}/ggml/src/ggml-cuda)
        endif()
    endforeach()

    if (TARGET ggml-rpc)
        target_sources(ggml-rpc PRIVATE ${ops}/rpc/sparse-rpc.cpp)
        target_include_directories(ggml-rpc PRIVATE ${ops}/rpc)
    endif()

    file(GLOB llama_sources CONFIGURE_DEPENDS ${ops}/llama/*.cpp)
    target_sources(llama PRIVATE ${llama_sources})
    target_include_directories(llama PUBLIC $<BUILD_INTERFACE:${ops}/llama>)
    set_source_files_properties(${llama_sources} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON
        COMPILE_OPTIONS $<$<CXX_COMPILER_ID:GNU>:-Wshadow=local>) # local: constructors of llama.cpp's headers shadow members
endfunction()

cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL sparq_attach)
